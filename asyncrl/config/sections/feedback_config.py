"""The section `[feedback]` of a config."""

import re
from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from asyncrl.config.sections.algorithm_config import PositiveFloat, Section
from asyncrl.config.sections.secret import WITHHELD, Secret


def _checked_key(key: Secret) -> Secret:
    if key.value not in ("", WITHHELD) and not re.fullmatch(r"[A-Za-z0-9_-]{8,128}", key.value):
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
    """Question to a person: how good an answer is (rate), or which of two is better (pick). The reward term `person` is
    from 0 to 1."""
    scale: Annotated[int, Field(ge=2, le=10)] = 5
    """Largest rating, which counts 1, as a rating of 1 counts 0; with 2 the page shows thumbs."""
    weight: PositiveFloat = 1.0
    """Factor of the person's value in the reward."""
    deadline: PositiveFloat = 300.0
    """Seconds that a sample waits for a person."""
    otherwise: Literal["ignore", "constant", "model"] = "ignore"
    """Value of a sample without a rating in time: none (ignore), `feedback.constant`, or the sigmoid of reward.model's
    score."""
    constant: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Value of an unrated sample with `otherwise = "constant"`."""
    host: Annotated[str, AfterValidator(_checked_host)] = "127.0.0.1"
    """IP address of the page, or localhost; it is not encrypted, so use loopback."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the page; 0 chooses a free one."""
    key: Annotated[Secret, AfterValidator(_checked_key)] = Secret("")
    """Key in the address of the page: 8 to 128 letters, digits, - and _. Default: a random one."""

    @property
    def asks(self) -> bool:
        """Says whether a person is asked at all."""
        return self.ask != "off"
