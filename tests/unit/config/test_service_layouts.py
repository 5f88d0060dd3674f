"""Layouts that services other than the trainer cannot have."""

from typing import Any

import pytest
from pydantic import ValidationError

from tests.unit.config.test_rules_between_keys import config

CRITIC = {"algorithm": {"preset": "ppo"}}
FROZEN = {"algorithm": {"kl": 0.1, "kl_estimator": "k3"}}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (CRITIC | {"critic": {"layout": {"pp": 2}}}, "critic.layout.* pp = 2 is not supported: write tp, dp or shard"),
        (CRITIC | {"critic": {"layout": {"sp": 2}}}, "critic.layout.* sp = 2 is not supported"),
        (CRITIC | {"critic": {"layout": {"dp": 65}}}, "critic.layout.* a step has 64 samples, and some of 65 ranks"),
        (CRITIC | {"critic": {"layout": {"tp": 2, "dp": 2, "shard": 2}}}, "critic.layout.* tp, dp and shard above one"),
        (CRITIC | {"critic": {"layout": {"dp": 2}}, "fleet": {"wire": "inproc"}}, "ranks of critic are processes"),
        (CRITIC | {"critic": {"layout": {"tp": 2}}, "training": {"optimizer": "muon"}}, "with critic.layout.tp"),
        (FROZEN | {"reference": {"layout": {"pp": 2}}}, "reference.layout.* pp = 2 is not supported: write tp, dp or"),
        (FROZEN | {"reward": {"layout": {"sp": 2}, "model": "m"}}, "reward.layout.* sp = 2 is not supported"),
        (FROZEN | {"reward": {"layout": {"tp": 2}}}, "there is no reward.model: write that, or layout"),
        (
            FROZEN | {"reward": {"layout": {"tp": 2}, "model": "m"}, "feedback": {"ask": "rate"}},
            "several ranks are not supported with people who rate",
        ),
    ],
)
def test_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        config(**sections)
