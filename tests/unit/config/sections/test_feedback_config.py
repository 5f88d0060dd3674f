"""Rules of the section `[feedback]`."""

from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.errors import ConfigError
from tests import golden

KEYS = r"feedback\.key: must be 8 to 128 characters, each a letter from A to Z, a digit, - or _$"
HOSTS = r"feedback\.host: must be localhost or an IP address of this machine, such as 127\.0\.0\.1, not "


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
        *((("--feedback.key", key), KEYS) for key in ("short", "has spaces in it", "k" * 129, "0123456\n")),
        *((("--feedback.host", host), HOSTS) for host in ("no-such-host", "", "127.0.0.1:80", "256.0.0.1")),
        (("--feedback.scale", "1"), r"feedback\.scale"),
        (("--feedback.port", "70000"), r"feedback\.port"),
        (("--feedback.weight", "0"), r"feedback\.weight"),
        (
            ("--reward.functions", '[{use = "numeric", weight = -2}]', "--feedback.weight", "2"),
            r"reward\.functions.*the weights, -2 and 2, sum to 0",
        ),
        (("--reward.functions", "[]", "--evaluate.prompts", "rows.jsonl"), r"nobody rates held-out answers"),
    ],
)
def test_what_cannot_work_is_refused(flags: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        loaded(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        ("--reward.functions", '["numeric"]'),
        ("--reward.functions", "[]", "--reward.model", "m"),
        ("--reward.functions", "[]", "--feedback.otherwise", "constant"),
    ],
)
def test_held_out_answers_may_have_other_terms(flags: tuple[str, ...]) -> None:
    assert loaded(*flags, "--evaluate.prompts", "rows.jsonl").warnings == []


def test_the_weight_of_a_person_counts_where_a_person_is_asked() -> None:
    negative = '[{use = "numeric", weight = -2}]'
    assert loaded("--reward.functions", negative, "--feedback.weight", "3").is_scored
    with golden.raises(ConfigError, match="over 0"):
        loaded("--reward.functions", negative, "--feedback.ask", "off", "--feedback.weight", "2")


@pytest.mark.parametrize(
    ("key", "host"), [("", "localhost"), ("k" * 8, "::1"), ("-_Az09" * 21, "127.0.0.2"), ("k" * 128, "0.0.0.0")]
)
def test_keys_and_hosts_that_are_taken(key: str, host: str) -> None:
    config = loaded("--feedback.key", key, "--feedback.host", host)
    assert (config.feedback.key.value, config.feedback.host) == (key, host)


@pytest.mark.parametrize("feedback", [{"weight": 2.0}, {"ask": "rate", "host": "0.0.0.0"}])
def test_warnings(feedback: dict[str, Any]) -> None:
    rewards = {"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, "reward": {"functions": ["exact_match"]}}
    (warning,) = Config.model_validate({**rewards, "feedback": feedback}).warnings
    golden.says(str(warning))
