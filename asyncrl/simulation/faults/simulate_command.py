"""Runs many trials for `scripts/simulate`; describes the first that fails, makes it smaller as long as it fails in the
same way, and prints the command that runs it again."""

import argparse
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

from asyncrl.concurrency import root_cause
from asyncrl.simulation.faults.trial_execution import TrialRun, run_trial
from asyncrl.simulation.faults.trial_plan import Trial, draw_episodes, draw_joined, draw_trial

CPU_LIMIT = 60.0
"""CPU-seconds of one trial, hundreds of times what it takes: a loop that awaits nothing stops the virtual clock."""
TRIALS_PER_LINE = 200
MOST_RUNS = 200
"""Smaller trials that are tried at most, which takes some seconds."""

SIMPLEST = Trial(groups=1, limit=0, slots=1, cut_at=None, steps=1, reward_time=0.0)
"""Shrinking sets the attributes of a trial to those of this one, except its seed and its faults."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs trials with injected faults, one a seed, and exits with status 1 at the first that fails. The digest in the
    last line covers every event, message and journal of all trials: the same command prints the same digest."""
    parser = argparse.ArgumentParser(prog="simulate", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="number of trials (default 1000)")
    parser.add_argument("--start", type=int, default=0, metavar="S", help="the first seed (default 0)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--episodes", action="store_true", help="draw trials whose samples are episodes of turns")
    kind.add_argument("--hosts", action="store_true", help="draw trials on machines that join, leave and are cut off")
    options = parser.parse_args(arguments)
    draw = draw_episodes if options.episodes else draw_joined if options.hosts else draw_trial
    began = time.monotonic()
    digest = sha256()
    messages = 0
    seen = Counter[str]()
    for trials in range(1, options.seeds + 1):
        seed = options.start + trials - 1
        outcome = outcome_of(draw(seed))
        if not isinstance(outcome, TrialRun):
            _report(seed, outcome, draw)
            return 1
        messages += outcome.faults.sent
        seen.update(fault.kind for fault in outcome.faults.injected)
        seen["lives"] += outcome.lives
        digest.update(outcome.digest.encode())
        if trials % TRIALS_PER_LINE == 0 or trials == options.seeds:
            done = f"{trials} trials held, {trials / (time.monotonic() - began):.1f} a second, {messages} messages"
            counts = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
            print(f"{done}; {counts}; digest {digest.hexdigest()[:16]}", flush=True)
    return 0


def _report(seed: int, error: BaseException, draw: Callable[[int], Trial]) -> None:
    print(f"seed {seed} failed: {described(error)}", flush=True)
    trial = shrink(draw(seed), lambda smaller: kind_of(outcome_of(smaller)))
    print(f"smallest trial found that fails in the same way: {described(outcome_of(trial))}")
    print(f"run it again: {command(trial)}", flush=True)


class EndlessTrial(AssertionError):
    """Ends a trial that computes without end; the message says where."""


def outcome_of(trial: Trial, cpu_limit: float = CPU_LIMIT) -> TrialRun | BaseException:
    """Runs a trial; returns what it did or the error that ended it. This is the supervised boundary of a trial."""
    try:
        with _limited_to(cpu_limit):
            return run_trial(trial)
    except Exception as error:  # any error of a trial is its failure, and is reported with its seed
        return root_cause(error)


def described(outcome: TrialRun | BaseException) -> str:
    return "held" if isinstance(outcome, TrialRun) else f"{kind_of(outcome)}: {outcome}"[:1000]


def command(trial: Trial) -> str:
    imports = (
        "from asyncrl.simulation.faults.trial_plan import *; from asyncrl.simulation.faults.trial_execution import *"
    )
    return f'.venv/bin/python -c "{imports}; run_trial({trial!r})"'


@contextmanager
def _limited_to(seconds: float) -> Iterator[None]:
    def endless(number: int, frame: FrameType | None) -> None:
        where = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
        raise EndlessTrial(f"the trial computed for {seconds:g} s{where}")

    before = signal.signal(signal.SIGPROF, endless)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


if __name__ == "__main__":
    raise SystemExit(main())


def kind_of(outcome: TrialRun | BaseException) -> str:
    """Returns the class of a failure and where it was raised, "" for a trial that held."""
    if isinstance(outcome, TrialRun):
        return ""
    frames = traceback.extract_tb(outcome.__traceback__)
    where = f" in {Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""
    return f"{type(outcome).__name__}{where}"


def shrink(trial: Trial, fails: Callable[[Trial], str]) -> Trial:
    """Returns the smallest trial found. It removes faults first, then simplifies one attribute after the other.

    fails: runs a trial; returns the kind of its failure, "" if it held.
    """
    kind = fails(trial)
    runs = 0
    assert kind, "a trial that holds cannot be shrunk"
    smaller = candidates(trial)
    while runs < MOST_RUNS and (each := next(smaller, None)) is not None:
        runs += 1
        if fails(each) == kind:
            trial = each
            smaller = candidates(each)
    return trial


def candidates(trial: Trial) -> Iterator[Trial]:
    """Yields trials that are simpler in one way each, the greatest simplifications first."""
    count = len(trial.faults)
    for size in sorted({count // 2, 1} - {0}, reverse=True):
        for start in range(0, count, size):
            yield replace(trial, faults=trial.faults[:start] + trial.faults[start + size :])
    for name in (item.name for item in fields(trial)):
        value = getattr(trial, name)
        simplest = getattr(SIMPLEST, name)
        if value != simplest and name not in ("seed", "faults"):
            values: list[Any] = [simplest]
            if isinstance(value, int) and isinstance(simplest, int) and value - 1 > simplest:
                values.append(value - 1)
            yield from (replace(trial, **{name: simpler}) for simpler in values)
    for number, fault in enumerate(trial.faults):
        if fault.turns:
            simpler = replace(fault, turns=0)
            yield replace(trial, faults=(*trial.faults[:number], simpler, *trial.faults[number + 1 :]))
