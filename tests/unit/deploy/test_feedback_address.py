"""The address of the feedback page: chosen once, kept over restarts, readable by its owner only."""

import json
import socket
from pathlib import Path

import pytest

from asyncrl.config.sections.runtime_config import FeedbackConfig
from asyncrl.deploy.run_fleet import feedback_address
from asyncrl.errors import ConfigError
from asyncrl.telemetry.run_directory import RunDirectory

CONFIG = FeedbackConfig(ask="rate")


def test_the_address_survives_a_restart(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    address = feedback_address(CONFIG, directory)
    assert address == feedback_address(CONFIG, directory)
    assert len(address.key.value) >= 20
    assert address.url == f"http://127.0.0.1:{address.port}/?key={address.key.value}"
    assert json.loads(directory.feedback.read_text())["url"] == address.url
    assert directory.feedback.stat().st_mode & 0o077 == 0


def test_a_port_that_is_taken_by_now_is_replaced_and_the_key_stays(tmp_path: Path) -> None:
    before = feedback_address(CONFIG, RunDirectory(tmp_path))
    with socket.create_server(("127.0.0.1", before.port)):
        after = feedback_address(CONFIG, RunDirectory(tmp_path))
        assert after.port != before.port
        assert after.key == before.key
        chosen = FeedbackConfig(ask="rate", port=before.port)
        with pytest.raises(
            ConfigError, match=rf"feedback\.port: 127\.0\.0\.1:{before.port} cannot be listened at: .*use"
        ):
            feedback_address(chosen, RunDirectory(tmp_path))


def test_what_the_config_names_is_used(tmp_path: Path) -> None:
    feedback_address(CONFIG, RunDirectory(tmp_path))
    RunDirectory(tmp_path).feedback.write_text("[damaged")
    address = feedback_address(FeedbackConfig(ask="rate", key="my-own-key", host="127.0.0.2"), RunDirectory(tmp_path))
    assert (address.host, address.key.value) == ("127.0.0.2", "my-own-key")


def test_an_address_that_this_machine_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"feedback\.port: 203\.0\.113\.7:0 cannot be listened at"):
        feedback_address(FeedbackConfig(ask="rate", host="203.0.113.7"), RunDirectory(tmp_path))
