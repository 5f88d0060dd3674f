"""Layouts that services other than the trainer cannot have."""

from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.config.sources import load
from asyncrl.config.sources.keys import table_keys
from asyncrl.errors import ConfigError
from tests import golden
from tests.unit.config.test_rules_between_keys import config

CRITIC = {"algorithm": {"preset": "ppo"}}
FROZEN = {"algorithm": {"kl": 0.1, "kl_estimator": "k3"}}


@pytest.mark.parametrize(
    "sections",
    [
        CRITIC | {"critic": {"layout": {"dp": 65}}},
        CRITIC | {"critic": {"layout": {"tp": 2, "dp": 2, "shard": 2}}},
        CRITIC | {"critic": {"layout": {"dp": 2}}, "fleet": {"wire": "inproc"}},
        CRITIC | {"critic": {"layout": {"tp": 2}}, "training": {"optimizer": "muon"}},
        FROZEN | {"reward": {"layout": {"tp": 2}}},
        FROZEN | {"reward": {"layout": {"tp": 2}, "model": "m"}, "feedback": {"ask": "rate"}},
    ],
)
def test_refused(sections: dict[str, Any]) -> None:
    with golden.raises(ValidationError):
        config(**sections)


@pytest.mark.parametrize("axis", ["pp", "sp", "ep"])
@pytest.mark.parametrize("service", ["reference", "critic", "cost_critic", "reward", "cost"])
def test_axes_of_the_trainer_are_no_keys_of_other_services(service: str, axis: str) -> None:
    assert f"{service}.layout.{axis}" not in table_keys()
    says = rf"{service}\.layout\.{axis}: {axis}: there is no such key; only training\.layout has {axis}: write tp, dp"
    with pytest.raises(ConfigError, match=says):
        load("quickstart", (f"--{service}.layout.{axis}", "2"), {})


def test_a_file_of_an_older_run_may_name_them_with_a_size_of_one() -> None:
    older = {"reference": {"layout": {"pp": 1, "tp": 1, "sp": 1, "dp": 1, "shard": 1, "ep": 1}}}
    assert config(**older).reference.layout == config().reference.layout
