"""Workers ask a Ray cluster for what replicas, devices and pools of the config say."""

import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.deploy import cli
from asyncrl.deploy.ray_hosts import RayPlace, _refuse_address, bundles, places_of
from asyncrl.errors import ConfigError
from asyncrl.lanes.bound_socket import bound_socket

LISTENS = {"listen": "tcp://127.0.0.1:7000", "wire": "tcp"}
NODES = [
    {"NodeManagerHostname": f"h{number}", "NodeManagerAddress": f"10.0.0.{number}", "Alive": number != 3}
    for number in (1, 2, 3)
]


def config(**changed: dict[str, Any]) -> Config:
    base = load("quickstart").config.model_dump()
    return Config.model_validate({**base, **{name: {**base[name], **keys} for name, keys in changed.items()}})


def test_each_worker_that_may_join_asks_for_a_processor() -> None:
    places = places_of(config(generation={"replicas": 2}))
    assert [place.name for place in places] == ["generation0", "generation1", "reward0", "evaluation0"]
    assert all(place.resources == {"CPU": 1.0} and not place.host for place in places)


def test_fleet_joined_and_ray_resources_say_which_workers_and_what_they_ask() -> None:
    asked = {"generation": {"CPU": 4.0, "rented": 1.0}}
    places = places_of(config(fleet={**LISTENS, "joined": {"generation": 1}, "ray_resources": asked}))
    assert places == [RayPlace("generation", "generation0", {"CPU": 4.0, "rented": 1.0})]
    with pytest.raises(ValidationError, match=r"fleet.ray_resources: no cost workers may join; those"):
        config(fleet={"ray_resources": {"cost": {"CPU": 1.0}}})


def test_vllm_stays_with_the_controller() -> None:
    assert [place.service for place in places_of(config(generation={"engine": "vllm"}))] == ["reward"]


def test_a_gpu_without_a_pool_is_one_that_ray_chooses() -> None:
    found = {place.service: place for place in places_of(config(generation={"device": "cuda"}))}
    assert found["generation"].resources == {"CPU": 1.0, "GPU": 1.0}
    assert not found["generation"].sees_all_gpus
    assert found["reward"].resources == {"CPU": 1.0}


def test_workers_of_a_pool_go_to_its_hosts_and_share_its_gpus() -> None:
    pools = {"farm": {"devices": ["cuda:0"], "hosts": ["h1", "h2"]}, "judges": {"hosts": ["h2"]}}
    joined = {"generation": 2, "evaluation": 1, "reward": 1}
    generation = {"pool": "farm", "replicas": 2}
    placed = config(pools=pools, generation=generation, reward={"pool": "judges"}, fleet={**LISTENS, "joined": joined})
    found = {place.name: place for place in places_of(placed)}
    assert {name: place.host for name, place in found.items()} == {
        "generation0": "h1",
        "generation1": "h2",
        "evaluation0": "h1",
        "reward0": "h2",
    }
    shares = [found[name].resources["GPU"] for name in ("generation0", "evaluation0")]
    assert 0.99 < sum(shares) <= 1.0, "both are on one GPU"
    assert found["generation1"].resources["GPU"] == pytest.approx(1.0, abs=1e-4)
    assert found["generation0"].sees_all_gpus
    assert not found["reward0"].sees_all_gpus
    asked = bundles(places_of(placed), NODES)
    assert sorted(asked[0]) == ["CPU", "GPU", "node:10.0.0.1"]
    assert asked[-1] == {"CPU": 1.0, "GPU": shares[1], "node:10.0.0.1": 0.001}


def test_a_host_of_a_pool_that_is_no_node_is_named_with_the_nodes_that_there_are() -> None:
    text = "pools: h3 is no node of the Ray cluster, whose nodes are h1, h2: name nodes as `hostname` prints them"
    with pytest.raises(ConfigError, match=re.escape(text)):
        bundles([RayPlace("reward", "reward0", {"CPU": 1.0}, "h3")], NODES)
    with pytest.raises(ConfigError, match="h3 and h4 are no nodes"):
        bundles([RayPlace("reward", f"reward{n}", {"CPU": 1.0}, f"h{n}") for n in (3, 4)], NODES)


# `--on ray` explains a missing Ray and a wrong address; tests/system/test_ray.py tests Ray itself.
def test_without_ray_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["run", "quickstart", "--on", "ray", "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("asyncrl: --on ray: Ray is not installed here; run: ")
    assert "[ray]" in said


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("ray://10.0.0.1:10001", "--address: ray://10.0.0.1:10001 is for clients outside of a Ray cluster"),
        ("http://10.0.0.1:8265", "use `ray job submit -- .*asyncrl.* run NAME --on ray`"),
        ("head", "'head' is no address of a Ray cluster; write HOST:PORT of its head"),
        ("no.such.host.invalid:6379", "no Ray cluster was reached at no.such.host.invalid:6379 within 5 s"),
    ],
)
def test_an_address_that_cannot_be_of_a_head_is_refused_with_what_to_write(address: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        _refuse_address(address, "--address")


def test_a_port_where_nothing_listens_is_refused_at_once() -> None:
    with closing(bound_socket("127.0.0.1", 0, "a test")) as socket:
        port = socket.getsockname()[1]
    text = f"RAY_ADDRESS: no Ray cluster was reached at 127.0.0.1:{port} .* `ray start --head --port={port}`"
    with pytest.raises(ConfigError, match=text):
        _refuse_address(f"127.0.0.1:{port}", "RAY_ADDRESS")
