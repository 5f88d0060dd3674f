"""Computes the metrics of a step: rewards of its samples, the trainer's report, and how workers spent the time."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev

from asyncrl.controller.gate.group_state import turns_differ
from asyncrl.environments.transcript import said_in
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import Health, StepReport
from asyncrl.telemetry.samples_file import SampleRecord
from asyncrl.telemetry.state_clock import STATES

COSTS = "cost/"
"""Prefix of the terms of a sample's cost, among those of its reward."""


def batch_metrics(batch: BatchRef, *, episodes: bool = False, turn_discount: float | None = None) -> dict[str, float]:
    """Computes `reward/*`, `cost/*` and `completions/*` of the samples of one step, and `episodes/*` where they are
    episodes. turn_discount: of advantages by turn."""
    rewards = [row.reward for row in batch if row.reward is not None]
    costs = [row.cost for row in batch if row.cost is not None]
    return {
        **({"cost/mean": fmean(costs)} if costs else {}),
        "reward/mean": _mean(rewards),
        "reward/std": pstdev(rewards) if rewards else float("nan"),
        **_within_groups(batch, turn_discount),
        "completions/length_mean": _mean([row.tokens for row in batch]),
        "completions/truncated_fraction": _mean([row.truncated for row in batch]),
        "completions/late_fraction": _mean([row.late > 0 for row in batch]),
        **(_of_episodes(batch) if episodes else {}),
    }


def _of_episodes(batch: BatchRef) -> dict[str, float]:
    """Computes how long episodes are and, as shares, why they ended."""
    ends = Counter(row.finish for row in batch)
    return {
        "episodes/turns_mean": _mean([row.turns for row in batch]),
        "episodes/given_tokens_mean": _mean([row.given for row in batch]),
        "episodes/cut_turns_mean": _mean([row.cut for row in batch]),
        **{f"episodes/finish/{reason}": count / len(batch) for reason, count in sorted(ends.items())},
    }


def _within_groups(batch: BatchRef, turn_discount: float | None) -> dict[str, float]:
    """Computes metrics of the groups with at least two rewards; returns none when there is no such group. Rewards are
    equal where they teach nothing, which advantages by turn tell by the rewards from each turn on."""
    groups: dict[int, list[tuple[float, Sequence[float]]]] = {}
    for row in batch:
        if row.reward is not None:
            parts = row.turn_rewards if turn_discount is not None else ()
            groups.setdefault(row.group, []).append((row.reward, parts or (row.reward,)))
    compared = [group for group in groups.values() if len(group) > 1]
    if not compared:
        return {}
    equal = fmean(not turns_differ((parts for _, parts in group), turn_discount or 0.0) for group in compared)
    spread = fmean(pstdev(reward for reward, _ in group) for group in compared)
    return {"reward/group_std": spread, "reward/equal_groups": equal}


def equal_texts(records: Sequence[SampleRecord]) -> dict[str, float]:
    """Computes the share of the recorded groups, of two samples or more, that have one text; of episodes that of all
    turns."""
    groups: dict[int, list[tuple[str, ...]]] = {}
    for record in records:
        groups.setdefault(record.group, []).append(said_in(record.turns) or (record.text,))
    same = [len(set(texts)) == 1 for texts in groups.values() if len(texts) > 1]
    return {"completions/equal_groups": fmean(same)} if same else {}


def term_metric(term: str) -> str:
    """Returns the metric name for the mean of a score's term; terms of costs have their own prefix."""
    return term if term.startswith(COSTS) else f"reward/{term}"


def step_of(report: StepReport) -> int:
    """Returns the number of a step: the version it led to or, when it trained nothing, would have led to."""
    return report.version + bool(report.skipped)


def report_metrics(report: StepReport, seconds: float) -> dict[str, float]:
    """Returns the trainer's measurements, its masks as shares, and its rate. seconds: wall clock since the end of the
    previous step."""
    trained = sum(sample.trained for sample in report.samples)
    total = trained + sum(sample.masked + sample.rejected for sample in report.samples)
    masked = Counter[str]()
    for sample in report.samples:
        masked[sample.reason] += sample.masked
    return {
        **report.metrics,
        "version": report.version,
        "mask/stale_fraction": masked["stale"] / max(1, total),
        "mask/truncated_fraction": masked["truncated"] / max(1, total),
        "perf/tokens_per_s": trained / seconds if seconds > 0 else 0.0,
    }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else float("nan")


class WorkerMetrics:
    """Turns what workers counted and spent since they started into metrics of the time between two calls.

    What is remembered of a worker is its newest answer; one that was restarted counts from its own start. The recorder
    calls it once a step.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, int, int], Health] = {}

    def since_last(self, healths: Sequence[Health]) -> dict[str, float]:
        """Returns by service `time/<service>/<state>`, shares of wall clock, mean over workers, which sum to 1 with
        `unaccounted`; `perf/queued/<service>`, the calls that wait for a compute thread; `environment/*`, counted since
        the last call; and `feedback/*`, as the worker that asks a person counts it."""
        shares: dict[str, list[dict[str, float]]] = {}
        sums: defaultdict[str, float] = defaultdict(float)
        for health in healths:
            worker = (health.service, health.replica, health.rank)
            known = self._before.get(worker)
            before = known if known is not None and known.instance == health.instance else None
            shares.setdefault(health.service, []).append(_shares(before, health))
            sums[f"perf/queued/{health.service}"] += health.queued
            for name, count in health.counters.items():
                if name.startswith("environment/"):
                    sums[name] += count - (before.counters.get(name, 0.0) if before else 0.0)
                elif name.startswith("feedback/"):
                    sums[name] = count
            self._before[worker] = health
        times = {
            f"time/{service}/{state}": fmean(worker[state] for worker in workers)
            for service, workers in shares.items()
            for state in (*STATES, "unaccounted")
        }
        return {**times, **sums}


def _shares(before: Health | None, health: Health) -> dict[str, float]:
    wall, seconds = (before.wall, before.seconds) if before else (0.0, {})
    passed = max(health.wall - wall, 1e-9)
    spent = {state: health.seconds.get(state, 0.0) - seconds.get(state, 0.0) for state in STATES}
    shares: dict[str, float] = {state: each / passed for state, each in spent.items()}
    return {**shares, "unaccounted": 1.0 - sum(shares.values())}
