"""Runs many trials for `scripts/simulate`; describes the first that fails, makes it smaller as long as it fails in the
same way, and prints the command that runs it again."""

import argparse
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import FrameType

from asyncrl.errors import root_cause
from asyncrl.simulation.faults.trial_execution import TrialOutcome, run_trial
from asyncrl.simulation.faults.trial_plan import Trial, draw_trial

CPU_LIMIT = 60.0
"""CPU-seconds of one trial, hundreds of times what it takes: a loop that awaits nothing stops the virtual clock."""
MOST_RUNS = 200
"""Smaller trials that are tried at most, which takes some seconds."""

SIMPLEST = Trial(reward_time=0.0, cut_at=None)
SIMPLER = (
    "remote",
    "reference",
    "shape",
    "latency",
    "flip_time",
    "unscorable",
    "reward_time",
    "finish",
    "cut_at",
    "policy",
)
"""Attributes of a trial that shrinking sets to those of SIMPLEST, in this order."""
LEAST = (("steps", 1), ("groups", 1), ("members", 2), ("generators", 1), ("scorers", 1), ("limit", 0), ("slots", 1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs trials with injected faults, one a seed, and exits with status 1 at the first that fails. The digest in the
    last line covers every event, message and journal of all trials: the same command prints the same digest."""
    options = _parsed(arguments)
    began, digest, messages, seen = time.monotonic(), sha256(), 0, Counter[str]()
    for trials in range(1, options.seeds + 1):
        seed = options.start + trials - 1
        outcome = outcome_of(draw_trial(seed))
        if not isinstance(outcome, TrialOutcome):
            _report(seed, outcome, options.as_it_is)
            return 1
        messages += outcome.messages
        seen.update(fault.kind for fault in outcome.injected)
        seen["lives"] += outcome.lives
        digest.update(outcome.digest.encode())
        if trials % options.every == 0 or trials == options.seeds:
            done = f"{trials} trials held, {trials / (time.monotonic() - began):.1f} a second, {messages} messages"
            counts = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
            print(f"{done}; {counts}; digest {digest.hexdigest()[:16]}", flush=True)
    return 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simulate", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="number of trials (default 1000)")
    parser.add_argument("--start", type=int, default=0, metavar="S", help="the first seed (default 0)")
    parser.add_argument("--every", type=int, default=200, metavar="K", help="trials per printed line (default 200)")
    parser.add_argument("--as-it-is", action="store_true", help="print a failing trial without shrinking it")
    return parser.parse_args(arguments)


def _report(seed: int, error: BaseException, as_it_is: bool) -> None:
    print(f"seed {seed} failed: {described(error)}", flush=True)
    trial = draw_trial(seed)
    if not as_it_is:
        trial = shrink(trial, lambda smaller: kind_of(outcome_of(smaller)))
        print(f"smallest trial found that fails in the same way: {described(outcome_of(trial))}")
    print(f"run it again: {command(trial)}", flush=True)


class EndlessTrial(AssertionError):
    """Ends a trial that computes without end; the message says where."""


def outcome_of(trial: Trial, cpu_limit: float = CPU_LIMIT) -> TrialOutcome | BaseException:
    """Runs a trial; returns what it did or the error that ended it. This is the supervised boundary of a trial."""
    try:
        with _limited_to(cpu_limit):
            return run_trial(trial)
    except Exception as error:  # any error of a trial is its failure, and is reported with its seed
        return root_cause(error)


def kind_of(outcome: TrialOutcome | BaseException) -> str:
    """Returns the class of a failure and where it was raised, "" for a trial that held."""
    if isinstance(outcome, TrialOutcome):
        return ""
    frames = traceback.extract_tb(outcome.__traceback__)
    where = f" in {Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""
    return f"{type(outcome).__name__}{where}"


def described(outcome: TrialOutcome | BaseException) -> str:
    return "held" if isinstance(outcome, TrialOutcome) else f"{kind_of(outcome)}: {outcome}"[:1000]


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


def shrink(trial: Trial, fails: Callable[[Trial], str]) -> Trial:
    """Returns the smallest trial found. It removes faults first, then chance, then steps, groups and workers.

    fails: runs a trial; returns the kind of its failure, "" if it held.
    """
    kind, runs = fails(trial), 0
    assert kind, "a trial that holds cannot be shrunk"
    smaller = candidates(trial)
    while runs < MOST_RUNS and (each := next(smaller, None)) is not None:
        runs += 1
        if fails(each) == kind:
            trial, smaller = each, candidates(each)
    return trial


def candidates(trial: Trial) -> Iterator[Trial]:
    """Yields trials that are simpler in one way each, the greatest simplifications first."""
    count = len(trial.faults)
    for size in sorted({count // 2, 1} - {0}, reverse=True):
        for start in range(0, count, size):
            yield replace(trial, faults=trial.faults[:start] + trial.faults[start + size :])
    for name in SIMPLER:
        if getattr(trial, name) != getattr(SIMPLEST, name):
            yield replace(trial, **{name: getattr(SIMPLEST, name)})
    for name, least in LEAST:
        if getattr(trial, name) > least:
            yield replace(trial, **{name: getattr(trial, name) - 1})
    for number, fault in enumerate(trial.faults):
        if fault.turns:
            simpler = replace(fault, turns=0)
            yield replace(trial, faults=(*trial.faults[:number], simpler, *trial.faults[number + 1 :]))


if __name__ == "__main__":
    raise SystemExit(main())
