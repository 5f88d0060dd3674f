"""Computes from what a run recorded the numbers of definitions.py.

busy_i is the share of the time in which workers of service i computed, weighted over steps by their length. The first
tenth of the steps is left out as warm-up. Evaluation is no stage of a step, and is listed only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from asyncrl.bench.overlap.definitions import (
    Interval,
    bound_efficiency,
    cluster_bubble,
    goodput,
    overlap_efficiency,
    overlap_fraction,
)
from asyncrl.deploy.report.run_record import RunRecord, lengths_of, mean_shares, services_of
from asyncrl.deploy.report.worker_trace import NEW_WEIGHTS, STEP, Arrow, Slice, WorkerTrace
from asyncrl.errors import ConfigError
from asyncrl.telemetry.jsonl import Object

LEAST_STEPS = 5
"""Steps after the warm-up below which shares are not reported."""
ROUNDING = 1e-3
"""By how much the shares of a worker may differ from 1 in sum."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """The accounting of one run.

    name: of the run. shares: of each service, by state. step: mean seconds of a step. steps: how many were counted.
    tokens: trained a second. devices: of the run. limit: of staleness. cycle: C in seconds, and `both_ran` the overlap
    fraction; None without a trace. traced: seconds of the trace, at the end of the run.
    """

    name: str
    shares: dict[str, dict[str, float]]
    step: float
    steps: int
    tokens: float
    devices: int
    limit: int
    cycle: float | None
    both_ran: float | None
    traced: float

    @property
    def stages(self) -> dict[str, float]:
        """Returns the share of the time in which each stage of a step was busy."""
        return {service: each["busy"] for service, each in self.shares.items() if service != "evaluation"}

    @property
    def slowest(self) -> str:
        """Returns the stage that is busy for the largest share."""
        return max(self.stages, key=self.stages.__getitem__)

    @property
    def efficiency(self) -> float:
        return overlap_efficiency(self.stages.values(), 1.0)

    @property
    def bound_efficiency(self) -> float | None:
        if self.cycle is None:
            return None
        seconds = [share * self.step for share in self.stages.values()]
        return bound_efficiency(seconds, self.cycle, self.limit, self.step)

    @property
    def bubble(self) -> float:
        """Returns the mean bubble ratio of the stages, which count as one device each."""
        return cluster_bubble(self.stages, dict.fromkeys(self.stages, 1.0), 1.0)

    @property
    def goodput(self) -> float:
        """Returns trained tokens a second and device."""
        return goodput(self.tokens, 1.0, self.devices)


def overlap_of(run: RunRecord, trace: WorkerTrace) -> Overlap:
    """Computes the accounting. Raises ConfigError for a run with too few steps, or with shares that do not add up."""
    first = max(1, len(run.steps) // 10)
    steps = run.steps[first:]
    lengths = lengths_of(run.seconds)[first:]
    if len(steps) < LEAST_STEPS:
        raise ConfigError(
            f"{run.path} trained {len(run.steps)} steps; shares say something from {LEAST_STEPS + 1} steps on"
        )
    total = sum(lengths)
    slices = trace.slices
    return Overlap(
        name=run.name,
        shares={service: shares_of(steps, lengths, service, run.name) for service in services_of(steps)},
        step=total / len(steps),
        steps=len(steps),
        tokens=sum(step.get("tokens/trained") or 0.0 for step in steps) / total,
        devices=run.devices,
        limit=run.config.staleness.limit,
        cycle=cycle_seconds(trace.arrows),
        both_ran=overlap_fraction(*busy_intervals(slices)),
        traced=slices[-1].end - slices[0].begin if slices else 0.0,
    )


def shares_of(steps: Sequence[Object], lengths: Sequence[float], service: str, run: str) -> dict[str, float]:
    """Returns the shares of the states of a service. Raises ConfigError when they do not add up to 1."""
    shares = mean_shares(steps, lengths, service)
    if abs(sum(shares.values()) - 1.0) > ROUNDING:
        raise ConfigError(
            f"{run}: the states of {service} add up to {sum(shares.values()):.4f} of the time, not 1: its metrics were "
            "written by another version of asyncrl"
        )
    return shares


def cycle_seconds(arrows: Sequence[Arrow]) -> float | None:
    """Returns the mean time from the begin of a group's generation until the weights of its step are in use; None where
    the trace holds no whole cycle."""
    in_use: dict[Slice, float] = {}
    for arrow in arrows:
        if arrow.what == "weights":
            in_use[arrow.begin] = min(arrow.end.end, in_use.get(arrow.begin, arrow.end.end))
    cycles = [
        in_use[arrow.end] - arrow.begin.begin
        for arrow in arrows
        if arrow.what == "samples" and arrow.end.name == STEP and arrow.end in in_use
    ]
    return fmean(cycles) if cycles else None


def busy_intervals(slices: Sequence[Slice]) -> tuple[list[Interval], list[Interval]]:
    """Returns when generators sampled and when the trainer trained, by their spans, from the first tenth of the steps
    that the trace holds to the last of them."""
    generated = [each for each in slices if each.worker.startswith("generation") and each.name != NEW_WEIGHTS]
    trained = [each for each in slices if each.worker.startswith("training") and each.name == STEP]
    if not trained:
        return [], []
    begin = trained[len(trained) // 10].begin
    end = max(each.end for each in trained)
    return _within(generated, begin, end), _within(trained, begin, end)


def _within(slices: Iterable[Slice], begin: float, end: float) -> list[Interval]:
    cut = ((max(each.begin, begin), min(each.end, end)) for each in slices)
    return [each for each in cut if each[0] < each[1]]
