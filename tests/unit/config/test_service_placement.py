from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.config.schema import Config, FleetConfig
from asyncrl.config.sources import load
from asyncrl.fleet.weight_transport import transport_of

LISTENS = {"listen": "tcp://127.0.0.1:7000", "wire": "tcp"}


def config(joined: dict[str, int], **fleet: Any) -> Config:
    base = load("quickstart").config
    return Config.model_validate({**base.model_dump(), "fleet": FleetConfig(joined=joined, **fleet).model_dump()})


def test_new_weights_reach_generation_that_joins_over_a_network() -> None:
    assert transport_of(config({"generation": 1}, **LISTENS)).name == "tcp"
    assert transport_of(config({"training": 1}, **LISTENS)).name == "tcp"
    assert transport_of(config({"reward": 1}, **LISTENS)).name == "shm"


@pytest.mark.parametrize(
    ("joined", "fleet", "why"),
    [
        ({"generation": 1}, {}, "write both or none"),
        ({}, LISTENS, "write both or none"),
        ({"generation": 1}, {**LISTENS, "wire": "ipc"}, 'write fleet.wire = "tcp"'),
        ({"generation": 2}, LISTENS, "2 generation workers are to join, and there are 1: raise generation.replicas"),
        ({"training": 2}, LISTENS, "2 training workers are to join, and there are 1: write training = 1"),
        ({"cost": 1}, LISTENS, "no cost workers may join; those .* are evaluation, generation, reward, training"),
    ],
)
def test_what_cannot_join_is_refused(joined: dict[str, int], fleet: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        config(joined, **fleet)


def test_all_ranks_of_the_trainer_join_or_none() -> None:
    base = load("quickstart").config.model_dump()
    base["training"]["layout"] = {"dp": 2}
    for ranks in (1, 3):
        fleet = FleetConfig(joined={"training": ranks}, **LISTENS).model_dump()
        with pytest.raises(ValidationError, match="write training = 2"):
            Config.model_validate({**base, "fleet": fleet})
    assert Config.model_validate({**base, "fleet": FleetConfig(joined={"training": 2}, **LISTENS).model_dump()})
