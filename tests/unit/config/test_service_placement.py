import re
from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.config.placement import joinable
from asyncrl.config.schema import Config, FleetConfig
from asyncrl.config.sources import load
from asyncrl.fleet.weight_transport import transport_of
from tests import golden

LISTENS = {"listen": "tcp://127.0.0.1:7000", "wire": "tcp"}


def config(joined: dict[str, int], **fleet: Any) -> Config:
    base = load("quickstart").config
    return Config.model_validate({**base.model_dump(), "fleet": FleetConfig(joined=joined, **fleet).model_dump()})


def test_new_weights_reach_generation_that_joins_over_a_network() -> None:
    assert transport_of(config({"generation": 1}, **LISTENS)).name == "tcp"
    assert transport_of(config({"training": 1}, **LISTENS)).name == "tcp"
    assert transport_of(config({"reward": 1}, **LISTENS)).name == "shm"


def test_several_ranks_of_a_reference_do_not_join_either() -> None:
    base = load("quickstart").config.model_dump()
    base |= {"algorithm": {"kl": 0.1}, "fleet": FleetConfig(joined={"reference": 1}, **LISTENS).model_dump()}
    assert "reference" in joinable(Config.model_validate(base))
    several = base | {"reference": {"layout": {"tp": 2}}}
    with golden.raises(ValidationError):
        Config.model_validate(several)
    assert "reference" not in joinable(Config.model_validate(several | {"fleet": {}}))


def test_several_ranks_of_a_critic_do_not_join() -> None:
    base = load("quickstart").config.model_dump()
    base |= {"algorithm": {"preset": "ppo"}, "fleet": FleetConfig(joined={"critic": 1}, **LISTENS).model_dump()}
    assert Config.model_validate(base)
    with golden.raises(ValidationError):
        Config.model_validate(base | {"critic": {"layout": {"shard": 2}}})


@pytest.mark.parametrize(
    ("joined", "fleet"),
    [
        ({"generation": 1}, {}),
        ({}, LISTENS),
        ({"generation": 1}, {**LISTENS, "wire": "ipc"}),
        ({"generation": 2}, LISTENS),
        ({"training": 2}, LISTENS),
        ({"cost": 1}, LISTENS),
    ],
)
def test_what_cannot_join_is_refused(joined: dict[str, int], fleet: dict[str, Any]) -> None:
    with golden.raises(ValidationError):
        config(joined, **fleet)


def test_all_ranks_of_the_trainer_join_or_none() -> None:
    base = load("quickstart").config.model_dump()
    base["training"]["layout"] = {"dp": 2}
    for ranks in (1, 3):
        fleet = FleetConfig(joined={"training": ranks}, **LISTENS).model_dump()
        with pytest.raises(ValidationError, match="write training = 2"):
            Config.model_validate({**base, "fleet": fleet})
    assert Config.model_validate({**base, "fleet": FleetConfig(joined={"training": 2}, **LISTENS).model_dump()})


INSIDE: dict[str, Any] = {"generation": {"colocate": "training"}, "staleness": {"limit": 0}}
"""Sections of a run in which the ranks of the trainer sample."""
JOINING = {"fleet": {"wire": "tcp", "listen": "tcp://127.0.0.1:9", "joined": {"training": 1}}}


def inside(**generation: Any) -> dict[str, Any]:
    return INSIDE | {"generation": INSIDE["generation"] | generation}


def sampled_by(trained: int, sampled: int) -> dict[str, Any]:
    """Sections of a run whose tensor ranks sample in groups."""
    return inside(layout={"tp": sampled}) | {"training": {"layout": {"tp": trained}}}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (INSIDE | {"staleness": {"limit": 1}}, "limit = 0"),
        (inside(engine="vllm"), 'engine = "torch"'),
        (inside(replicas=2), "replicas = 1"),
        (inside(layout_tp=2), "generation.layout"),
        (inside(stored_samples="file.parquet"), ""),
        (inside(device="cuda:0"), 'device = "cpu"'),
        (inside(pool="p") | {"pools": {"p": {"devices": ["cuda:0"]}}}, ""),
        ({"generation": {"layout": {"tp": 2}}}, 'colocate = "training"'),
        (
            {"generation": {"layout": {"tp": 2}, "engine": "vllm"}},
            "or write generation.layout = { tp = 1 } and layout_tp for vLLM",
        ),
        (sampled_by(4, 3), "tp = 4 slices"),
        (sampled_by(4, 3), "generation.layout = { tp = 2 } or { tp = 4 }"),
        (sampled_by(2, 4), "generation.layout = { tp = 2 }"),
        (sampled_by(1, 2), "generation.layout = { tp = 1 }"),
        (inside(layout={"pp": 2}) | {"training": {"layout": {"pp": 3}}}, "pp = 3 stages"),
        ({"generation": {"colocate": "halves"}}, '"halves"'),
        (sampled_by(2, 2) | {"environment": {"use": "countdown"}}, ""),
        (sampled_by(2, 2) | {"training": {"layout": {"tp": 2}, "router_replay": True}}, "router_replay = false"),
        (INSIDE | {"fleet": {"wire": "inproc"}}, ""),
        (INSIDE | JOINING, ""),
        ({"staleness": {"admission": "lockstep"}}, ""),
        (inside(device="cuda") | {"training": {"device": "cuda", "layout": {"dp": 2}}}, ""),
    ],
)
def test_what_ranks_that_sample_cannot_do_is_refused(sections: dict[str, Any], says: str) -> None:
    """Names what to write instead."""
    with golden.raises(ValidationError, match=re.escape(says)):
        Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "none"}, **sections})


@pytest.mark.parametrize("layout", [{"shard": 2}, {"pp": 2}, {"sp": 2}, {"tp": 2, "shard": 2}, {"pp": 2, "tp": 2}])
def test_ranks_of_every_layout_may_sample(layout: dict[str, int]) -> None:
    Config.model_validate(
        {"model": {"name": "m"}, "task": {"prompts": "none"}, **INSIDE, "training": {"layout": layout}}
    )
