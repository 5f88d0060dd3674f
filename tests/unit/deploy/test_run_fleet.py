"""The address of the feedback page: chosen once, kept over restarts, readable by its owner only."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.sections.runtime_config import FeedbackConfig
from asyncrl.config.sources import load
from asyncrl.deploy.run_fleet import feedback_address, offered_files
from asyncrl.errors import ConfigError
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.data.file_cache import OfferedFiles
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


@pytest.fixture
def facts(tmp_path: Path) -> RunFacts:
    for name in (
        "run/config.toml",
        "run/logs/longest_prompts.jsonl",
        "model/model.safetensors",
        "model/tokenizer.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return RunFacts("ab", tmp_path / "run", tmp_path / "model", 0, "none", load("quickstart").config)


def names(offered: list[OfferedFiles]) -> dict[str, list[str]]:
    return {f"{each.use} {each.folder.name}": list(each.present()) for each in offered}


def test_a_generator_reads_the_model_and_the_prompts_that_it_checks(facts: RunFacts) -> None:
    assert names(list(offered_files("generation", facts, {}))) == {
        "run run": ["config.toml"],
        "folder model": ["model.safetensors", "tokenizer.json"],
        "files logs": ["longest_prompts.jsonl"],
    }


@pytest.mark.parametrize("service", ["training", "critic", "cost_critic"])
def test_who_writes_checkpoints_has_to_see_the_run_directory_of_this_start(facts: RunFacts, service: str) -> None:
    (facts.run_dir / "run.start").write_text("ab")
    assert names(list(offered_files(service, facts, {}))) == {
        "shared run": ["config.toml", "run.start"],
        "folder model": ["model.safetensors", "tokenizer.json"],
    }


@pytest.mark.parametrize("by_file", [True, False])
def test_a_reward_worker_reads_the_tokenizer_and_code_of_the_user(
    facts: RunFacts, by_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "code")
    (tmp_path / "code" / "my_rewards_here.py").write_text("import my_helper\ndef score(sample): return 1.0\n")
    (tmp_path / "code" / "my_helper.py").write_text("")
    (tmp_path / "code" / "unrelated.py").write_text("")
    monkeypatch.chdir(tmp_path / "code")
    use = f"{tmp_path}/linked/my_rewards_here.py:score" if by_file else "my_rewards_here:score"
    config = load("quickstart", flags=["--reward.functions", f'["exact_match", "{use}"]']).config
    assert names(list(offered_files("reward", replace(facts, config=config), {}))) == {
        "run run": ["config.toml"],
        "folder model": ["tokenizer.json"],
        ("files linked" if by_file else "module code"): ["my_helper.py", "my_rewards_here.py"],
    }


def test_code_of_asyncrl_itself_is_offered_to_nobody(facts: RunFacts) -> None:
    config = load("guess", flags=["--environment.use", "asyncrl.environments.games:Guess"]).config
    offered = list(offered_files("environment", replace(facts, config=config), {}))
    assert [each.use for each in offered] == ["run", "folder"]
