"""The spaces of an environment in plain values, as networks and rows need them, without Gymnasium.

An observation is a vector of float32: a box is flattened, a number of a discrete space becomes a one-hot vector.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from asyncrl.errors import ConfigError

Kind = Literal["discrete", "box"]


@dataclass(frozen=True, slots=True)
class ActionSpace:
    """Actions of a policy. kind: "discrete", numbers from `start`, `size` of them; "box", vectors of `size` numbers
    between `low` and `high`, which have `shape` in the environment."""

    kind: Kind
    size: int
    start: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()

    @property
    def stored(self) -> int:
        """Returns the numbers of a stored action: an index, or the vector before it is squashed."""
        return 1 if self.kind == "discrete" else self.size


@dataclass(frozen=True, slots=True)
class Spaces:
    """observation: length of the vector that the policy sees. name: of both spaces, as Gymnasium prints them."""

    observation: int
    action: ActionSpace
    name: str = ""

    def plain(self) -> dict[str, Any]:
        """Returns plain values, for JSON and pipes."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        """Reads what `plain` returned, also after JSON made lists of its tuples."""
        action: dict[str, Any] = dict(plain["action"])
        action |= {key: tuple(value) for key, value in action.items() if isinstance(value, list)}
        return cls(int(plain["observation"]), ActionSpace(**action), str(plain["name"]))


def unusable_space(space: ActionSpace, algorithm: str) -> str:
    """Returns why an algorithm cannot act in this space, or ""."""
    if algorithm == "sac" and space.kind != "box":
        return 'SAC acts in boxes of numbers, and these actions are discrete: write acting.algorithm = "ppo"'
    return ""


# The file with the spaces of an environment, in the folder of a policy.


SPACES = "spaces.json"


def write_spaces(path: Path, spaces: Spaces) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spaces.plain()) + "\n")


def read_spaces(folder: Path) -> Spaces:
    """Reads the spaces of the policy in a folder; raises ConfigError where the file is damaged."""
    path = folder / SPACES
    try:
        return Spaces.of(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not have the spaces of an environment: {error}; start the run anew") from error
