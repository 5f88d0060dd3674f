"""The section `[feedback]` of a config, and the rules about it."""

import re
from collections.abc import Iterator
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from asyncrl.config.algorithm_config import PositiveFloat, Section
from asyncrl.config.problems import Problem

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SHARE_OF_CALL = 0.9
"""Share of fleet.call_deadline that a sample may wait for a person; the rest is for scoring it."""


def _checked_key(key: str) -> str:
    if key and not re.fullmatch(r"[A-Za-z0-9_-]{8,128}", key):
        raise PydanticCustomError(
            "feedback_key", "must be 8 to 128 characters, each a letter from A to Z, a digit, - or _"
        )
    return key


def _checked_host(host: str) -> str:
    try:
        return host if host == "localhost" else str(ip_address(host))
    except ValueError:
        text = "must be localhost or an IP address of this machine, such as 127.0.0.1"
        raise PydanticCustomError("feedback_host", text) from None


class FeedbackConfig(Section):
    """Live feedback: a person rates answers on a web page while the run trains."""

    ask: Literal["off", "rate", "pick"] = "off"
    """Question to a person. rate: how good an answer is. pick: which of two answers to one prompt is better. The value
    is the reward term `person`, from 0 to 1."""
    scale: Annotated[int, Field(ge=2, le=10)] = 5
    """Largest rating. 1 counts as 0, the largest as 1; with 2 the page shows thumbs."""
    weight: PositiveFloat = 1.0
    """Factor of the person's value in the reward."""
    deadline: PositiveFloat = 300.0
    """Seconds that a sample waits for a person."""
    otherwise: Literal["ignore", "constant", "model"] = "ignore"
    """Value of a sample that nobody rated in time. ignore: the sample is left out. constant: `feedback.constant`.
    model: sigmoid of the score of reward.model. Held-out samples, which no person sees, get this value too."""
    constant: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Value of an unrated sample with `otherwise = "constant"`."""
    host: Annotated[str, AfterValidator(_checked_host)] = "127.0.0.1"
    """IP address of this machine, or localhost, at which the page is served. Answers and key are sent unencrypted, so
    use loopback."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the page. 0 chooses a free one for the whole run."""
    key: Annotated[str, AfterValidator(_checked_key)] = ""
    """Key in the address of the page, of 8 to 128 letters, digits, - and _. Default: a random key for the whole run."""

    @property
    def asks(self) -> bool:
        """Says whether a person is asked at all."""
        return self.ask != "off"


def feedback_problems(config: "Config") -> Iterator[Problem]:
    """Yields what is wrong with the section, and warnings about it."""
    section = config.feedback
    if not section.asks:
        for key in sorted(section.model_dump(exclude_defaults=True)):
            text = 'nothing reads it without feedback: remove it, or write feedback.ask = "rate"'
            yield Problem(f"feedback.{key}", "", text, ("feedback.ask",), is_warning=True)
        return
    if config.reward.replicas > 1:
        text = "one worker serves the page and scores: write reward.replicas = 1"
        yield Problem("reward.replicas", "", text, ("feedback.ask",))
    if section.deadline > (longest := SHARE_OF_CALL * config.fleet.call_deadline):
        text = f"a call is given up after fleet.call_deadline, so write {longest:g} or less, or a longer call_deadline"
        yield Problem("feedback.deadline", "", text, ("fleet.call_deadline",))
    if section.otherwise == "model" and not config.reward.model:
        text = 'there is no model: write reward.model, a folder made by "asyncrl preferences fit"'
        yield Problem("feedback.otherwise", "", text, ("reward.model",))
    if section.otherwise == "ignore" and config.evaluate.prompts and not config.reward.terms:
        text = """nobody rates held-out answers, so they have no reward: write otherwise = "constant" or "model",
            reward.functions, or no evaluate.prompts"""
        yield Problem("feedback.otherwise", "", " ".join(text.split()), ("evaluate.prompts",))
    yield from _pick_problems(config)
    if section.host not in LOOPBACK:
        text = "whoever reaches this address can read key and answers on their way: use a tunnel to 127.0.0.1"
        yield Problem("feedback.host", "", text, is_warning=True)


def _pick_problems(config: "Config") -> Iterator[Problem]:
    if config.feedback.ask != "pick":
        return
    if config.algorithm.advantage == "greedy":
        text = 'a greedy answer has no pair to be compared with: write ask = "rate"'
        yield Problem("feedback.ask", "", text, ("algorithm.advantage",))
    elif config.task.samples_per_prompt % 2:
        text = "answers of one prompt are compared in pairs: write an even number"
        yield Problem("task.samples_per_prompt", "", text, ("feedback.ask",))
