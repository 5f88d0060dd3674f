"""Says of finished runs how much their services overlapped and what held them up, where the steps of two differ, and
what made the slowest step slow."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from asyncrl.bench.measurements import table
from asyncrl.bench.overlap.accounting import Overlap, bubble_ratio, mfu_of, overlap_of
from asyncrl.deploy.report.run_record import ACCOUNTED, RunRecord, lengths_of, read_run, services_of
from asyncrl.deploy.report.worker_trace import read_trace
from asyncrl.errors import ConfigError

# ---- what holds a run up, in one sentence, and the key to change ----


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


# ---- `asyncrl-bench diff RUN_A RUN_B` ----

STATES_SHOWN = 8
"""States with the largest differences that are shown."""
DIFFERENT = 0.01
"""Share of a step of A from which a difference is shown."""


def diff(arguments: Sequence[str]) -> None:
    """Says where the steps of run B differ from those of A: in seconds of each state of each service, in what follows
    from them, and in the keys of the config."""
    parser = argparse.ArgumentParser("asyncrl-bench diff", description=diff.__doc__)
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN_DIR", help="Name two run directories.")
    asked = parser.parse_args(arguments)
    runs = [read_run(path) for path in asked.runs]
    first, second = (overlap_of(run, read_trace(run.path / "logs")) for run in runs)
    print("\n".join([*differences(first, second), *changed_keys(*runs)]))


def differences(first: Overlap, second: Overlap) -> Iterator[str]:
    """Yields the numbers of both runs side by side, and the states that differ most."""
    yield table(("", first.name, second.name, "ratio"), [_ratio_row(*each) for each in _numbers(first, second)])
    longer = second.step - first.step
    yield f"a step of {second.name} takes {abs(longer):.3f} s {'more' if longer > 0 else 'less'}; by service and state:"
    mine = _seconds(first)
    other = _seconds(second)
    found = {key: other.get(key, 0.0) - mine.get(key, 0.0) for key in {**mine, **other}}
    shown = sorted(found, key=lambda key: -abs(found[key]))[:STATES_SHOWN]
    rows = [
        (*key, f"{mine.get(key, 0.0):.3f}", f"{other.get(key, 0.0):.3f}", f"{found[key]:+.3f}")
        for key in shown
        if abs(found[key]) > DIFFERENT * first.step
    ]
    yield table(("service", "state", f"{first.name}, s", f"{second.name}, s", "s"), rows) if rows else "  nothing"


def changed_keys(first: RunRecord, second: RunRecord) -> Iterator[str]:
    """Yields the keys of the config that differ."""
    mine, other = (_flat(run.config.model_dump(mode="json")) for run in (first, second))
    changed = [key for key in mine if mine[key] != other.get(key)]
    yield f"{len(changed)} keys of the config differ{':' if changed else ''}"
    for key in changed:
        yield f"  {key}: {mine[key]!r}, {other.get(key)!r}"


def _numbers(first: Overlap, second: Overlap) -> Iterator[tuple[str, float, float]]:
    yield "seconds a step", first.step, second.step
    yield "trained tokens a second", first.tokens, second.tokens
    yield "overlap efficiency", first.efficiency, second.efficiency
    if first.bound_efficiency is not None and second.bound_efficiency is not None:
        yield "bound efficiency", first.bound_efficiency, second.bound_efficiency
    if first.both_ran is not None and second.both_ran is not None:
        yield "overlap fraction", first.both_ran, second.both_ran
    yield "bubble", first.bubble, second.bubble


def _ratio_row(name: str, mine: float, other: float) -> tuple[str, str, str, str]:
    return name, f"{mine:,.3f}", f"{other:,.3f}", f"{other / mine:.2f}" if mine else "-"


def _seconds(run: Overlap) -> dict[tuple[str, str], float]:
    """Returns the seconds of a step in each state of each service."""
    return {(name, state): shares[state] * run.step for name, shares in run.shares.items() for state in ACCOUNTED}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


# ---- `asyncrl-bench why RUN_DIR` ----

EXCESSES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Excess:
    """Seconds that a service spent in a state in one step, and in the median step."""

    service: str
    state: str
    seconds: float
    usual: float

    @property
    def more(self) -> float:
        return self.seconds - self.usual


def why(arguments: Sequence[str]) -> None:
    """Explains the slowest step of a run: what workers did longer than in the median step."""
    parser = argparse.ArgumentParser("asyncrl-bench why", description=why.__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="Name the run directory.")
    parser.add_argument("--step", type=int, help="Explain this step instead of the slowest one.")
    asked = parser.parse_args(arguments)
    print("\n".join(explain(read_run(asked.run), asked.step)))


def explain(run: RunRecord, wanted: int | None = None) -> list[str]:
    """Returns the lines to print. The first step is left out, because the fleet starts in it. Raises ConfigError."""
    numbers = [step["step"] for step in run.steps[1:]]
    lengths = lengths_of(run.seconds)[1:]
    if len(numbers) < 2:
        raise ConfigError(f"{run.path} trained {len(run.steps)} steps; there is a slowest one from 3 steps on")
    if wanted is not None and wanted not in numbers:
        raise ConfigError(f"--step: {run.path} has steps {numbers[0]} to {numbers[-1]}, and not {wanted}")
    at = numbers.index(wanted) if wanted is not None else lengths.index(max(lengths))
    usual = median(lengths)
    ratio = lengths[at] / usual if usual else 1.0
    head = f"step {numbers[at]} took {lengths[at]:.3f} s, {ratio:.1f} times the median of {usual:.3f} s"
    found = sorted(_excesses(run, lengths, at), key=lambda each: each.more, reverse=True)
    lines = [
        f"  {each.service} was {each.state} for {each.seconds:.3f} s, {each.more:.3f} s longer than usual"
        for each in found[:EXCESSES_SHOWN]
        if each.more > 0.01 * lengths[at]
    ]
    tokens = [step.get("tokens/trained") or 0.0 for step in run.steps[1:]]
    if tokens[at] > 1.2 * median(tokens):
        lines.append(f"  it trained {tokens[at]:,.0f} tokens, and the median step {median(tokens):,.0f}")
    if run.steps[at + 1]["incarnation"] != run.steps[at]["incarnation"]:
        lines.append("  the run was resumed before it, and its first step waits for the first samples")
    return [head, *(lines or ["  no state of a service took noticeably longer: the machine itself may have been busy"])]


def _excesses(run: RunRecord, lengths: Sequence[float], at: int) -> list[Excess]:
    steps = run.steps[1:]
    found = []
    for service in services_of(steps):
        for state in ACCOUNTED:
            if (service, state) == ("evaluation", "starved"):
                continue  # It waits for the next version that is evaluated.
            key = f"time/{service}/{state}"
            spent = [length * (step.get(key) or 0.0) for step, length in zip(steps, lengths, strict=True)]
            found.append(Excess(service, state, spent[at], median(spent)))
    return found
