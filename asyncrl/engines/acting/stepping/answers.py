"""The answers of environments, read from the message of a child, which runs the code of the user."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WireError

Floats = NDArray[np.float32]
TERMINATED = 1
TRUNCATED = 2
"""Bits of how an episode ended."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of some environments. places: of them. observations [places, observation]: before a reset; following:
    after it. errors: why an episode was ended, by place. continued: False where there was no action to answer, and the
    episode of the last answer ends with it."""

    places: NDArray[np.int64]
    observations: Floats
    rewards: Floats
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    following: Floats
    errors: Mapping[int, str] = field(default_factory=dict)
    continued: bool = True

    @property
    def ended(self) -> NDArray[np.bool_]:
        return self.terminated | self.truncated


def read_answers(message: Any, owned: range, observation: int) -> Answers:
    """Reads a message about some of the environments `owned`, by their places among those; observation: numbers of one.
    Raises WireError for anything malformed."""
    match message:
        case {
            "places": list(places),
            "observations": bytes(seen),
            "rewards": bytes(gained),
            "ends": bytes(ends),
            **more,
        }:
            pass
        case _:
            raise WireError(f"an environment answered {message!r:.100}")
    count = len(places)
    ended = sum(map(bool, ends))
    following: Any = more.get("following")
    errors = more.get("errors", {})
    known = all(type(place) is int and 0 <= place < len(owned) for place in places) and len({*places}) == count > 0
    sizes = (len(seen), len(gained), len(ends), len(following) if isinstance(following, bytes) else -1)
    if not known or sizes != (4 * count * observation, 4 * count, count, 4 * ended * observation):
        raise WireError(f"an environment answered for places {places!r:.100}, of {len(owned)}, in {sizes} bytes")
    observations = np.frombuffer(seen, np.float32).reshape(count, observation)
    flags = np.frombuffer(ends, np.uint8)
    then = observations
    if ended:
        then = observations.copy()
        then[flags > 0] = np.frombuffer(bytes(following), np.float32).reshape(ended, observation)
    rewards = np.frombuffer(gained, np.float32)
    if not (np.isfinite(observations).all() and np.isfinite(then).all() and np.isfinite(rewards).all()):
        raise WireError("an environment answered with numbers that are not finite")
    stops = (flags & TERMINATED > 0, flags & TRUNCATED > 0)
    return Answers(np.array(places) + owned.start, observations, rewards, *stops, then, _read_errors(errors, owned))


def _read_errors(errors: Any, owned: range) -> dict[int, str]:
    if not isinstance(errors, dict):
        raise WireError(f"an environment answered with the errors {errors!r:.100}")
    found = {}
    for place, text in errors.items():
        if type(place) is not int or not 0 <= place < len(owned) or not isinstance(text, str):
            raise WireError(f"an environment answered with the error {text!r:.100} of {place!r:.100}")
        found[owned.start + place] = text
    return found
