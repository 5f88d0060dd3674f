"""`asyncrl-bench why RUN_DIR` explains the slowest step of a run: what workers did longer than in the median step."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from asyncrl.deploy.report.run_record import ACCOUNTED, RunRecord, lengths_of, read_run, services_of
from asyncrl.errors import ConfigError

SHOWN = 5


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


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench why", description=__doc__)
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
        for each in found[:SHOWN]
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
