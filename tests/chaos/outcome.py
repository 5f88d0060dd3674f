"""Evaluates a trial of chaos: the cost of each kind of fault, and whether each promise held."""

import os
import platform
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any

from asyncrl.config.sources import load
from asyncrl.controller.journal.audit import audit
from asyncrl.telemetry.jsonl import read_metrics
from tests.chaos.faults import HOSTS
from tests.chaos.injection import Injected
from tests.chaos.run_watch import Loss
from tests.chaos.trial import Trial

NOTICE = {"network": 9.0, "stop": 2.5}
"""Seconds after the end of a fault until which a loss counts as its doing: four heartbeats of two seconds, and less
after a stopped process goes on."""
KILLS = ("kill", "host")
NOTICE_OF_DEATH = 1.5
LAST = 50
"""Steps whose mean reward is the reward at the end."""
REWARD = 0.9
"""Reward that the quickstart reaches."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds from the end of a fault, of a kill from the kill, until the next step was trained, and until each worker
    that it took was replaced; None for never."""

    done: Injected
    next_step: float | None
    replaced: float | None

    @property
    def took(self) -> bool:
        """Returns whether it took a worker."""
        return self.replaced != 0

    @property
    def recovered(self) -> float | None:
        if self.next_step is None or self.replaced is None:
            return None
        return max(self.next_step, self.replaced)


@dataclass
class Outcome:
    """problems: what did not hold, empty when all did."""

    trial: Trial
    run_dir: Path
    shown: str
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        watch = self.trial.fleet.watch
        self.costs = []
        for done in self.trial.faults:
            replaced = watch.replaced(done.ended, partial(caused, done, self.trial.faults))
            self.costs.append(Cost(done, watch.next_step(done.ended), replaced))
        self.report = audit(self.run_dir)
        self.metrics = read_metrics(self.run_dir / "metrics.jsonl")
        self.staleness = max(line.get("staleness/max", 0.0) for line in self.metrics)
        self.reward = fmean([line["reward/mean"] for line in self.metrics[-LAST:]] or [0.0])
        self.blamed = len(re.findall("given up as poison", self.shown))
        self._judge()

    def _judge(self) -> None:
        self.problems += self.trial.fleet.failures
        limit = load(self.trial.fleet.experiment).config.staleness.limit
        if not self.report.ok:
            self.problems.append(f"the audit fails: {self.report}")
        if self.staleness > limit:
            self.problems.append(f"staleness reached {self.staleness:g}, and the limit is {limit}")
        if self.blamed:
            self.problems.append(f"{self.blamed} healthy groups were blamed")
        if never := [str(cost.done.fault) for cost in self.costs if cost.recovered is None]:
            self.problems.append(f"no recovery from: {'; '.join(never)}")

    @property
    def recoveries(self) -> list[float]:
        """Returns the seconds of each fault, without an end where the run has not recovered from it."""
        return [inf if cost.recovered is None else cost.recovered for cost in self.costs]

    def rows(self) -> list[tuple[str, int, str, str]]:
        """Returns kind, number of faults, and median and worst of both times, in the order of kinds."""
        by_kind = defaultdict(list)
        for cost in self.costs:
            by_kind[cost.done.fault.kind].append(cost)
        return [
            (kind.name, len(costs), _spread([c.next_step for c in costs]), _spread([c.replaced for c in costs]))
            for kind in self.trial.kinds
            if (costs := by_kind.get(kind))
        ]

    def table(self) -> str:
        lines = [
            "| fault | times | next step, median (worst) s | workers replaced, median (worst) s |",
            "|---|---|---|---|",
        ]
        return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in self.rows())])

    def summary(self) -> dict[str, Any]:
        exits = {each.name: dict(each.exits) for each in self.trial.fleet.programs}
        return {
            "seed": self.trial.seed,
            "machine": f"{platform.machine()}, Linux {platform.release()}",
            "faults": len(self.costs),
            "passed_over": self.trial.passed_over,
            "steps": len(self.trial.fleet.watch.steps),
            "last_step": self.metrics[-1]["step"] if self.metrics else 0,
            "audit": self.report.ok,
            "staleness_max": self.staleness,
            "reward": round(self.reward, 4),
            "blamed": self.blamed,
            "ended_by_themselves": len(self.trial.fleet.failures),
            "controllers": self.trial.fleet.controllers,
            "longest_stay_at_the_end_of_a_controller_s": round(self.trial.fleet.stay),
            "load": [round(load, 1) for load in os.getloadavg()],
            "median_next_step_s": _middle([inf if c.next_step is None else c.next_step for c in self.costs]),
            "took_workers": len(losses := [inf if c.replaced is None else c.replaced for c in self.costs if c.took]),
            "median_replaced_s": _middle(losses),
            "median_recovery_s": _middle(self.recoveries),
            "worst_recovery_s": _middle([max(self.recoveries)]) if self.recoveries else None,
            "worst_recovery_of": self._worst(),
            "exits": exits,
            "problems": self.problems,
        }

    def _worst(self) -> str:
        worst = max(zip(self.recoveries, self.costs, strict=True), key=lambda each: each[0])[1]
        return f"{worst.done.fault}, {worst.done.began - self.trial.began:.0f} s after the first"

    def details(self) -> list[dict[str, Any]]:
        return [
            {
                "fault": cost.done.fault.kind.name,
                "hosts": cost.done.fault.hosts,
                "roles": cost.done.fault.roles,
                "at": round(cost.done.began - self.trial.began, 2),
                "seconds": round(cost.done.ended - cost.done.began, 2),
                "next_step": _rounded(cost.next_step),
                "replaced": _rounded(cost.replaced),
            }
            for cost in self.costs
        ]


def caused(done: Injected, faults: Sequence[Injected], loss: Loss) -> bool:
    """Returns whether a loss counts as the doing of a fault. What a kill explains is not the doing of a network or of a
    stopped process beside it. faults: all."""
    if done.fault.kind.family in NOTICE and any(
        _fits(each, loss) for each in faults if each.fault.kind.family in KILLS
    ):
        return False
    return _fits(done, loss)


def _fits(done: Injected, loss: Loss) -> bool:
    """Returns whether time and place agree. An outage of the controller takes workers of all hosts."""
    kind = done.fault.kind
    hosts = HOSTS if kind.is_outage else done.fault.hosts
    until = done.ended + NOTICE.get(kind.family, NOTICE_OF_DEATH)
    return done.began <= loss.at <= until and loss.host in {f"h{host}" for host in hosts}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


def _middle(times: list[float]) -> float | str | None:
    if not times:
        return None
    middle = median(times)
    return "never" if middle == inf else round(middle, 3)


def _spread(times: list[float | None]) -> str:
    known = [each for each in times if each is not None]
    if len(known) < len(times):
        return "never"
    return "-" if not any(known) else f"{median(known):.1f} ({max(known):.1f})"
