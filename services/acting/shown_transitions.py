"""Shows transitions of a policy that acts to a person, as plain values with numbers to four digits."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engines.acting.networks import performed
from asyncrl.engines.acting.stepping.spaces import Spaces

SHOWN = ("observations", "actions", "logprobs", "rewards", "terminated", "truncated", "versions")
"""Columns of rows that are shown."""


def shown_transitions(columns: dict[str, NDArray[Any]], spaces: Spaces, most: int) -> list[dict[str, Any]]:
    """Returns the first `most` transitions of a row at most: observation, action as the environment got it, logprob,
    reward, version, and ended: "terminated" or "truncated", where an episode ended. columns: those of SHOWN."""
    observations = columns["observations"].reshape(-1, spaces.observation)[:most]
    stored = torch.from_numpy(np.array(columns["actions"])).reshape(-1, spaces.action.stored)[:most]
    rows = zip(observations, performed(stored, spaces.action), *(columns[name] for name in SHOWN[2:]), strict=False)
    return [
        {
            "observation": _digits(observation),
            "action": int(action[0]) if spaces.action.kind == "discrete" else _digits(action),
            "logprob": _digit(logprob),
            "reward": _digit(reward),
            "version": int(version),
            **({"ended": "terminated" if terminated else "truncated"} if terminated or truncated else {}),
        }
        for observation, action, logprob, reward, terminated, truncated, version in rows
    ]


def _digits(values: Iterable[float]) -> list[float]:
    return [_digit(value) for value in values]


def _digit(value: float) -> float:
    return float(f"{value:.4g}")
