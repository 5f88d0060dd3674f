"""Says how much the services of finished runs overlapped, and what held them up; compares each run with the first."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.bench.measurements import table
from asyncrl.bench.overlap.accounting import Overlap, bubble_ratio, mfu_of, overlap_of
from asyncrl.deploy.report.run_record import ACCOUNTED, read_run
from asyncrl.deploy.report.worker_trace import read_trace

# Names in one sentence what holds a run up, and the key to change.


NEARLY_ALWAYS = 0.9
"""Share of the time from which a stage counts as never waiting."""
NOTICEABLE = 0.1
"""Share of the time from which a state is worth a change."""

KNOBS = {
    "generation": "more workers (generation.replicas), more samples at a time (generation.slots) or a second device",
    "training": "a device of its own, more ranks (training.layout) or larger micro-batches",
    "reward": "more workers or processes (reward.replicas, reward.workers)",
    "cost": "more workers or processes (cost.replicas, cost.workers)",
    "reference": "more workers (reference.replicas), or algorithm.kl = 0",
    "environment": "more workers or processes (environment.replicas)",
}
"""Keys that shorten each stage."""


def bottleneck(overlap: Overlap) -> str:
    """Returns what holds the run up: a stage that never waits, or else what the stages wait for most."""
    slowest = overlap.slowest
    shares = overlap.shares[overlap.slowest]
    busy = f"{slowest} is busy {shares['busy']:.0%} of the time"
    if shares["busy"] >= NEARLY_ALWAYS:
        return f"{busy} and hardly waits: it is the bottleneck. {_knob(slowest)}"
    state = max(("starved", "blocked", "sync", "overhead"), key=shares.__getitem__)
    if shares[state] < NOTICEABLE:
        return f"{busy}; no single wait takes a tenth of its time. {_knob(slowest)}"
    match state:
        case "blocked":
            return f"{busy} and the staleness gate holds it back for {shares[state]:.0%}: raise staleness.limit"
        case "sync":
            return f"{busy} and exchanges weights or gradients for {shares[state]:.0%}: see weights.transport and codec"
        case "overhead":
            return f"{busy} and the runtime takes {shares[state]:.0%}: larger steps or longer answers make that smaller"
    second = _second(overlap)
    return (
        f"{busy} and waits for input for {shares[state]:.0%}: the stages take turns, as {second} is busy only "
        f"{overlap.stages[second]:.0%}; raise staleness.limit or task.prompts_per_step so that more is on its way"
    )


def _knob(service: str) -> str:
    return f"It gets shorter by {KNOBS.get(service, 'a device of its own')}"


def _second(overlap: Overlap) -> str:
    others = {name: share for name, share in overlap.stages.items() if name != overlap.slowest}
    return max(others, key=others.__getitem__) if others else overlap.slowest


def analyse(paths: Sequence[Path], peak: float | None = None) -> None:
    """Prints the accounting of finished runs, and compares them. peak: FLOPs a second of one device, for loop MFU."""
    runs = [read_run(path) for path in paths]
    found = [overlap_of(run, read_trace(run.path / "logs")) for run in runs]
    for run, overlap in zip(runs, found, strict=True):
        print("\n".join(described(overlap)))
        if peak is not None:
            print(
                f"loop MFU {mfu_of(run, peak):.2%} of {run.devices} x {peak / 1e12:g} TFLOP/s, completion tokens only"
            )
        print()
    if len(found) > 1:
        print(compared(found))


def described(overlap: Overlap) -> Iterator[str]:
    """Yields the lines about one run."""
    yield f"{overlap.name}: {overlap.steps} steps of {overlap.step:.3f} s after the warm-up, limit {overlap.limit}"
    rows = [
        [service, *(percent(shares[state]) for state in ACCOUNTED), percent(bubble_ratio(shares["busy"], 1.0))]
        for service, shares in overlap.shares.items()
    ]
    yield table(["service", *ACCOUNTED, "bubble"], rows)
    yield f"overlap efficiency {overlap.efficiency:.3f} (step over slowest stage {1 / overlap.efficiency:.2f})"
    if overlap.cycle is not None and overlap.bound_efficiency is not None:
        yield (
            f"bound efficiency {overlap.bound_efficiency:.3f}: a cycle takes {overlap.cycle:.3f} s "
            f"(of the last {overlap.traced:.1f} s, which the trace holds)"
        )
    if overlap.both_ran is not None:
        yield f"overlap fraction {overlap.both_ran:.3f} of generation and training, in the same seconds"
    yield f"goodput {overlap.goodput:,.0f} trained tokens a second and device, on {overlap.devices}"
    yield bottleneck(overlap)


def percent(share: float) -> str:
    """Formats a share; a tiny negative one, which rounding leaves, as 0."""
    return f"{max(0.0, share) if share > -0.0005 else share:.1%}"


def compared(found: Sequence[Overlap]) -> str:
    """Returns a table of the runs, with ratios over the first."""
    first = found[0]
    rows = [
        [
            each.name,
            f"{each.step:.3f}",
            f"{first.step / each.step:.2f}",
            f"{each.tokens:,.0f}",
            f"{each.tokens / first.tokens:.2f}" if first.tokens else "-",
            f"{each.efficiency:.3f}",
            each.slowest,
        ]
        for each in found
    ]
    head = ["run", "s a step", "speed-up", "tokens/s", "ratio", "efficiency", "slowest stage"]
    return f"speed-up and ratio over {first.name}, on whatever ran beside them:\n{table(head, rows)}"
