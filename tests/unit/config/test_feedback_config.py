"""Rules of the section `[feedback]`."""

from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.errors import ConfigError


def loaded(*flags: str) -> Config:
    keys = {"--feedback.ask": "rate", "--evaluate.prompts": "", **dict(zip(flags[::2], flags[1::2], strict=True))}
    return load("quickstart", [f"{key}={value}" for key, value in keys.items()], {}).config


def test_a_person_may_be_the_only_reward() -> None:
    assert loaded("--reward.functions", "[]").is_scored
    assert loaded("--reward.functions", "[]").warnings == []


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--reward.replicas", "2"), r"reward\.replicas.*one worker serves the page"),
        (("--feedback.deadline", "599"), r"feedback\.deadline.*write 540 or less"),
        (("--feedback.otherwise", "model"), r"feedback\.otherwise.*there is no model"),
        (("--feedback.ask", "pick", "--task.samples_per_prompt", "3"), r"samples_per_prompt.*even number"),
        (("--feedback.ask", "pick", "--algorithm.preset", "remax"), r"feedback\.ask.*greedy answer"),
        (("--feedback.key", "short"), r"feedback\.key"),
        (("--feedback.key", "has spaces in it"), r"feedback\.key"),
        (("--feedback.scale", "1"), r"feedback\.scale"),
        (("--feedback.port", "70000"), r"feedback\.port"),
        (("--feedback.weight", "0"), r"feedback\.weight"),
        (("--reward.functions", "[]", "--evaluate.prompts", "rows.jsonl"), r"nobody rates held-out answers"),
    ],
)
def test_what_cannot_work_is_refused(flags: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        loaded(*flags)


@pytest.mark.parametrize(
    ("feedback", "text"),
    [({"weight": 2.0}, "nothing reads it without feedback"), ({"ask": "rate", "host": "0.0.0.0"}, "use a tunnel")],
)
def test_warnings(feedback: dict[str, Any], text: str) -> None:
    rewards = {"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, "reward": {"functions": ["exact_match"]}}
    (warning,) = Config.model_validate({**rewards, "feedback": feedback}).warnings
    assert text in str(warning)
