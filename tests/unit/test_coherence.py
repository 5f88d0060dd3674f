"""Values that are valid one by one and make no sense together."""

from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.config import Config


def config(**sections: Any) -> Config:
    task = {"prompts": "p.jsonl", **sections.pop("task", {})}
    return Config.model_validate({"model": {"name": "m"}, "task": task, **sections})


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"task": {"samples_per_prompt": 1}}, "no baseline"),
        ({"staleness": {"cut_at": 1}}, "2 to 8"),
        ({"staleness": {"cut_at": 9}}, "2 to 8"),
        ({"staleness": {"cut_at": 4, "policy": "drop"}}, "remove it"),
        ({"algorithm": {"weight_cap": 2.0}}, "count the staleness twice"),
        ({"algorithm": {"weight_cap": 0.5, "old_logprobs": "recomputed"}}, "corrects nothing"),
        ({"algorithm": {"kl": 0.1, "kl_estimator": "k1"}}, "k1 as a loss has zero expected gradient"),
        ({"algorithm": {"kl": 0.1, "kl_in": "reward"}}, 'write kl_estimator = "k1"'),
        ({"algorithm": {"kl": 0.1, "kl_in": "reward", "kl_estimator": "k3"}}, 'write kl_estimator = "k1"'),
        ({"training": {"updates": 65}}, "64 samples"),
        ({"training": {"warmup_steps": 100, "schedule": "linear"}}, "warm-up"),
        ({"training": {"layout_dp": 65}}, "64 samples, which leaves some of 65 ranks without any; write 64 or fewer"),
        ({"training": {"layout_dp": 2}, "fleet": {"wire": "inproc"}}, "ranks of the trainer are processes"),
        ({"training": {"layout_dp": 0}}, "greater than 0"),
        ({"evaluate": {"samples": 4}}, "temperature 0"),
        ({"generation": {"deadline": 900}}, "never reached"),
        ({"reward": {"deadline": 900}}, "never reached"),
        ({"reward": {"functions": ["numeric", {"use": "f.py:g", "name": "numeric"}]}}, "'numeric'"),
    ],
)
def test_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        config(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"staleness": {"cut_at": 8}},
        {"staleness": {"cut_at": 2}},
        {"staleness": {"cut_at": "never", "policy": "drop"}},
        {"algorithm": {"weight_cap": 1.0, "old_logprobs": "recomputed"}},
        {"algorithm": {"kl": 0.1, "kl_estimator": "k1", "kl_in": "reward"}},
        {"algorithm": {"kl": 0.0, "kl_estimator": "k1"}},
        {"algorithm": {"kl": 0.0, "kl_in": "reward"}},
        {"training": {"updates": 64}},
        {"training": {"layout_dp": 64}},
        {"training": {"layout_dp": 1}, "fleet": {"wire": "inproc"}},
        {"evaluate": {"samples": 4, "temperature": 0.7}},
        {"reward": {"functions": ["numeric", {"use": "numeric", "name": "strict"}]}},
    ],
)
def test_allowed(sections: dict[str, Any]) -> None:
    assert config(**sections)


def test_all_contradictions_are_reported_together() -> None:
    with pytest.raises(ValidationError, match=r"(?s)twice.*temperature 0"):
        config(algorithm={"weight_cap": 2}, evaluate={"samples": 4})


def test_a_text_is_short_for_a_reward_function() -> None:
    assert config(reward={"functions": ["numeric"]}).reward.functions[0].use == "numeric"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_no_deadline_is_endless(value: float) -> None:
    with pytest.raises(ValidationError):
        config(fleet={"call_deadline": value})
