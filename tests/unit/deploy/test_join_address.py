from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config, FleetConfig, ModelConfig, TaskConfig
from asyncrl.deploy.join_address import (
    address_of_this_host,
    join_address,
    join_keys,
    listen_address,
    local_address_towards,
    refuse_missing_keys,
)
from asyncrl.errors import ConfigError
from asyncrl.fleet.launching.key_folder import KeyFolder

ELSEWHERE = "tcp://192.0.2.7:7000"
"""An address of a network for documentation, RFC 5737."""


def config(listen: str, **fleet: Any) -> Config:
    joined = FleetConfig.model_validate({"wire": "tcp", "listen": listen, "joined": {"generation": 1}, **fleet})
    return Config(model=ModelConfig(name="m"), task=TaskConfig(prompts="p"), fleet=joined)


def test_names_of_hosts_become_numbers() -> None:
    assert join_address("tcp://localhost:7000", "x") == "tcp://127.0.0.1:7000"
    assert local_address_towards("tcp://127.0.0.1:7000") == "127.0.0.1"
    assert join_address("tcp://[0:0:0:0:0:0:0:1]:7000", "x") == "tcp://[::1]:7000"
    assert local_address_towards("tcp://[::1]:7000") == "::1"
    assert address_of_this_host("::1", "x") == "::1"
    assert listen_address(config("tcp://[::1]:7000")) == "tcp://[::1]:7000"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("127.0.0.1:7000", "is no address; write tcp://HOST:PORT"),
        ("tcp://127.0.0.1:70000", "is no address"),
        ("tcp://0.0.0.0:7000", "is every address of a host"),
        ("tcp://[::]:7000", "is every address of a host"),
        ("tcp://::1:7000", "is no address; write tcp://HOST:PORT"),
        ("tcp://[::1]", "is no address"),
        ("tcp://[2001:db8::7]:7000", "join_keys names no keys"),
        ("tcp://no.such.host.invalid:7000", "there is no host"),
    ],
)
def test_what_is_no_address_of_one_host_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"fleet.listen: .*{why}"):
        listen_address(config(text))


def test_other_hosts_reach_a_run_only_with_keys_made_for_them(tmp_path: Path) -> None:
    assert listen_address(config("tcp://127.0.0.1:7000")) == "tcp://127.0.0.1:7000"
    with pytest.raises(ConfigError, match="join_keys names no keys: make a folder of them with `asyncrl admit"):
        listen_address(config(ELSEWHERE))
    assert listen_address(config(ELSEWHERE, join_keys=str(tmp_path))) == ELSEWHERE


def test_a_run_on_loopback_makes_its_keys_once(tmp_path: Path) -> None:
    first = join_keys(config("tcp://127.0.0.1:7000"), tmp_path).controller_keys()
    assert join_keys(config("tcp://127.0.0.1:7000"), tmp_path).controller_keys() == first, "a resume keeps them"
    assert [path.name for path in (tmp_path / "join_keys").glob("generation.key")] == ["generation.key"]


def test_a_folder_without_keys_is_named_with_the_command_that_makes_them(tmp_path: Path) -> None:
    wanted = config(ELSEWHERE, join_keys=str(tmp_path / "keys"), joined={"reward": 1, "generation": 1})
    with pytest.raises(ConfigError, match=f"admit {tmp_path}/keys generation`, `.*admit {tmp_path}/keys reward`"):
        refuse_missing_keys(wanted)
    KeyFolder.made(tmp_path / "keys").key_of("generation")
    refuse_missing_keys(wanted)
    refuse_missing_keys(config("tcp://127.0.0.1:7000"))
