"""Pools in a config: services get their devices from them, and what does not fit is refused with both."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.placement import assignment
from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.config.toml_writer import dump
from asyncrl.deploy.service_specs import service_specs
from asyncrl.errors import ConfigError
from tests import golden

TOML = """
[pools.gpus]
devices = ["cuda:0", "cuda:1"]
memory_gb = 40
[pools.farm]
hosts = ["node1", "node2"]
[model]
name = "m"
[task]
prompts = "p"
[generation]
pool = "gpus"
replicas = 2
[training]
pool = "gpus"
[reward]
functions = ["exact_match"]
"""


def loaded(tmp_path: Path, text: str = TOML, *flags: str) -> Config:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return load(str(path), list(flags)).config


def test_services_take_their_devices_from_their_pool(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    assert (config.training.device, config.generation.device, config.reference.device) == ("cuda:0", "cuda:1", "cpu")
    devices = {spec.name: spec.devices for spec in service_specs(config)}
    assert devices == {"generation": [("cuda:1",), ("cuda:0",)], "training": [("cuda:0",), ("cuda:1",)], "reward": []}
    assert config.pools["gpus"].pool("gpus").memory_bytes == 40 * 10**9


def test_without_pools_everything_is_as_the_sections_say(tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, "training": {"device": "cuda"}})
    assert config.training.device == "cuda"
    assert not assignment(config)
    assert all(not spec.devices for spec in service_specs(config))


def test_a_written_config_is_read_back(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    assert loaded(tmp_path, dump(config)) == config


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--generation.pool", "gpu"], ["generation.pool", "'gpu', which does not exist: there are farm, gpus"]),
        (["--generation.replicas", "3"], ["generation.pool", "generation has 3 workers", "pool 'gpus' has room for 2"]),
        (
            ["--reward.pool", "farm"],
            ["reward.pool", "pool 'farm' is of hosts that join", "fleet.joined = { reward = 1"],
        ),
    ],
)
def test_what_does_not_fit_names_service_and_pool(flags: list[str], says: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, TOML, *flags)
    assert all(each in str(refused.value) for each in says), refused.value


@pytest.mark.parametrize("devices", [[], ["cuda"], ["cpu", "cuda:0"], ["cuda:0", "cuda:0"], ["tpu:1"]])
def test_devices_that_are_none(devices: list[str]) -> None:
    values: dict[str, Any] = {"model": {"name": "m"}, "task": {"prompts": "p"}, "pools": {"p": {"devices": devices}}}
    with pytest.raises(ValueError, match=r"device|pool"):
        Config.model_validate(values)


def test_a_pool_without_services_is_a_warning(tmp_path: Path) -> None:
    assert any("no service runs in pool 'farm'" in str(each) for each in loaded(tmp_path).warnings)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ('devices = ["gpu0"]', "item 1: 'gpu0'"),
        ('devices = ["cuda:0", "cuda:0"]', ""),
        ('hosts = ["node1", "node1"]', ""),
        ("memory_gb = -5", "memory_gb"),
        ("memory = 5", "mean memory_gb?"),
    ],
)
def test_a_mistake_in_a_pool_names_the_pool_and_is_the_only_one(table: str, why: str, tmp_path: Path) -> None:
    wrong = TOML.replace('hosts = ["node1", "node2"]', table).replace("[reward]", '[reward]\npool = "farm"')
    with pytest.raises(ConfigError) as raised:
        loaded(tmp_path, wrong)
    golden.says(str(raised.value), why)
    assert "mistakes" not in str(raised.value), "services of a pool with a mistake bring no further one"
    assert "value error" not in str(raised.value).lower()
