"""Pools in a config: services get their devices from them, and what does not fit is refused with both."""

from pathlib import Path
from typing import Any

from asyncrl.config.placement import assignment, joinable
from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.config.toml_writer import dump
from asyncrl.deploy.service_specs import service_specs
from asyncrl.fleet.weight_transport import transport_of

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


LISTENS = {"listen": "tcp://127.0.0.1:7000", "wire": "tcp"}


def joined(service: str, **sections: Any) -> Config:
    fleet = {"joined": {service: 1}, **LISTENS}
    return Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, "fleet": fleet, **sections})


def test_new_weights_reach_generation_that_joins_over_a_network() -> None:
    transports = [transport_of(joined(service)).name for service in ("generation", "training", "reward")]
    assert transports == ["tcp", "tcp", "shm"]


def test_several_ranks_of_a_reference_do_not_join() -> None:
    needed = {"algorithm": {"kl": 0.1}}
    assert "reference" in joinable(joined("reference", **needed))
    assert "reference" not in joinable(joined("reward", **needed, reference={"layout": {"tp": 2}}))
