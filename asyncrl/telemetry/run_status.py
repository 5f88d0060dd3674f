"""The state of a running run in one small file, which is replaced every few seconds; `asyncrl monitor` shows it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.protocols.messages import Health
from asyncrl.telemetry.run_directory import replace_text

SECONDS = 2.0
"""Time between two states."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker. name: such as generation0[1]. problem: why it takes no calls, else "". doing: its running calls.
    shares: of the time since the state before, by activity, such as busy and starved. cores: CPU-seconds a second since
    then. memory: resident bytes. starts: how often it was started since the run began, or was resumed. counters: since
    its start. rates: what it finished a second, such as samples and tokens. version: of the policy's weights that it
    has, None where it has none. gpu: bytes `memory`, `total` and `own`, {} without a GPU. service: whose worker it is.
    """

    name: str
    instance: str
    problem: str
    doing: tuple[str, ...]
    queued: int
    shares: Mapping[str, float]
    cores: float
    memory: int
    starts: int
    counters: Mapping[str, float]
    rates: Mapping[str, float] = field(default_factory=dict)
    version: int | None = None
    gpu: Mapping[str, float] = field(default_factory=dict)
    service: str = ""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One moment. written_at: Unix time in seconds. version: of the trainer's weights. samples: by stage; ended ones
    of the whole run. ended: whether the run trains no more. incarnation: how often the run was resumed. paused:
    whether a command holds draws and steps back."""

    written_at: float
    version: int
    steps: int
    samples: Mapping[str, int]
    workers: tuple[WorkerStatus, ...]
    ended: bool = False
    incarnation: int = 0
    paused: bool = False


def write_status(path: Path, status: RunStatus) -> None:
    """Replaces the file at once, so that a reader sees one state or the other. Raises OSError."""
    replace_text(path, json.dumps(asdict(status)))


def read_status(path: Path) -> RunStatus | None:
    """Returns the newest state; None where none was written. Raises ConfigError when the file holds something else."""
    try:
        return parse_status(path.read_text(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError as error:
        raise _damaged(str(path), error) from error


def parse_status(text: str, where: str) -> RunStatus:
    """Returns the state in a text. where: names its place in errors. Raises ConfigError when the text holds something
    else."""
    try:
        fields: dict[str, Any] = json.loads(text)
        workers = tuple(WorkerStatus(**{**worker, "doing": tuple(worker["doing"])}) for worker in fields.pop("workers"))
        return RunStatus(**fields, workers=workers)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(where, error) from error


def _damaged(where: str, error: Exception) -> ConfigError:
    return ConfigError(f"{where} is damaged ({error!r:.80}); a run that goes on replaces it within {SECONDS:g} s")


FINISHED = ("samples", "tokens", "answers")
"""Counters of what a worker finishes, which have rates."""


def shares_between(before: Health | None, after: Health) -> dict[str, float]:
    """Returns what share of the wall-clock time between two reports of one instance each activity took; since its
    start where none came before."""
    return _rates(before, after, lambda health: health.seconds)


def rates_between(before: Health | None, after: Health) -> dict[str, float]:
    """Returns what a worker finished a second between two reports of one instance, or since its start."""
    return _rates(before, after, lambda health: {n: v for n, v in health.counters.items() if n in FINISHED})


def cores_between(before: Health | None, after: Health) -> float:
    """Returns CPU-seconds a second of wall-clock time between two reports of one instance, or since its start."""
    return _rates(before, after, lambda health: {"cpu": health.cpu}).get("cpu", 0.0)


def _rates(before: Health | None, after: Health, amounts: Callable[[Health], Mapping[str, float]]) -> dict[str, float]:
    """Returns by how much each amount grew a second. Amounts of another instance, or of a later time, do not count."""
    earlier: Mapping[str, float] = {}
    wall = after.wall
    if before is not None and before.instance == after.instance and after.wall > before.wall:
        earlier = amounts(before)
        wall = after.wall - before.wall
    return {name: (value - earlier.get(name, 0.0)) / wall for name, value in amounts(after).items()} if wall > 0 else {}
