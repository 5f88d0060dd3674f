"""Knows which checkpoint has the best value of a metric, which the rotation of checkpoints then spares.

a step or an evaluation ends ──> note ──> kept: what the next commit does not remove, and best.json
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path

from asyncrl.controller.journal.checkpoints import newest_model, saved_model
from asyncrl.errors import ConfigError
from asyncrl.rewards.templates import reaches
from asyncrl.telemetry.run_directory import RunDirectory, replace_text

BEST = "best"
"""Stands for the number of that checkpoint in commands."""


@dataclass
class BestCheckpoint:
    """Follows `training.keep_best`. path: best.json. metric: "-" before its name: the lowest value is the best; "": no
    checkpoint is kept. pending: returns the versions whose evaluation is not known yet."""

    path: Path
    metric: str
    pending: Callable[[], Collection[int]] = tuple
    values: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._name = self.metric.removeprefix("-")
        self._newest = -1

    @property
    def is_evaluated(self) -> bool:
        """Returns whether evaluations measure the metric, and not steps."""
        return self._name.startswith("eval/")

    def restore(self, version: int) -> None:
        """Takes the values of checkpoints up to this version, which an earlier start of the run noted."""
        self._newest = version
        if not self.metric or not self.path.exists():
            return
        found = json.loads(self.path.read_text())
        if found["metric"] == self.metric:
            self.values = {int(each): value for each, value in found["values"].items() if int(each) <= version}

    def note(self, version: int, metrics: Mapping[str, float]) -> None:
        """Takes what was measured of a version."""
        self._newest = max(self._newest, version)
        if self.metric and self._name in metrics:
            self.values[version] = metrics[self._name]

    def kept(self, versions: Sequence[int]) -> set[int]:
        """Returns those of the checkpoints that stay, however many are newer: the best one, and those that may be."""
        if not self.metric:
            return set()
        unknown = self.pending() if self.is_evaluated else (each for each in versions if each > self._newest)
        best = self.best(versions)
        return {*unknown, *(() if best is None else (best,))}

    def best(self, versions: Sequence[int]) -> int | None:
        """Returns the best of these checkpoints, the newest of those that are equal but for rounding; None while
        nothing is known of any."""
        sign = -1.0 if self.metric.startswith("-") else 1.0
        known = {
            each: sign * self.values[each]
            for each in sorted(versions, reverse=True)
            if not isnan(self.values.get(each, nan))
        }
        most = max(known.values(), default=0.0)
        return next((each for each, value in known.items() if reaches(value, most)), None)

    def write(self, versions: Sequence[int]) -> None:
        """Writes best.json, if there is a best checkpoint. Raises OSError."""
        if (best := self.best(versions)) is None:
            return
        newer = max(versions)
        self.values = {each: value for each, value in self.values.items() if each in versions or each > newer}
        found = {"metric": self.metric, "version": best, "value": self.values[best], "values": self.values}
        replace_text(self.path, json.dumps(found) + "\n")


def chosen_model(run_dir: Path, step: str = "") -> tuple[Path, int]:
    """Returns `model/` of a checkpoint and its version. step: its number, `best`, or "" for the newest good one. Raises
    ConfigError when there is none, and JournalError when it is damaged."""
    if not step:
        return newest_model(run_dir)
    if step.isdecimal():
        return saved_model(run_dir, int(step))
    if step != BEST:
        raise ConfigError(f"--step {step}: write the number of a step, or {BEST}")
    if not (path := RunDirectory(run_dir).best).exists():
        raise ConfigError(f"{run_dir} keeps no best checkpoint: train with training.keep_best = METRIC")
    return saved_model(run_dir, int(json.loads(path.read_text())["version"]))
