"""Describes how a trial failed, and how to run it again."""

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from asyncrl.errors import root_cause
from asyncrl.simulation.faults.trial_plan import Trial
from asyncrl.simulation.faults.trial_run import TrialOutcome, run_trial

CPU_LIMIT = 60.0
"""CPU-seconds of one trial, hundreds of times what it takes: a loop that awaits nothing stops the virtual clock."""


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
    """Describes the outcome in one line."""
    return "held" if isinstance(outcome, TrialOutcome) else f"{kind_of(outcome)}: {outcome}"[:1000]


def command(trial: Trial) -> str:
    """Returns the command that runs this trial again."""
    imports = "from asyncrl.simulation.faults.trial_plan import *; from asyncrl.simulation.faults.trial_run import *"
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
