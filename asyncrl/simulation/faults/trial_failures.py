"""How a trial ends that does not hold."""

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from asyncrl.errors import first
from asyncrl.faulty.plan import Trial
from asyncrl.faulty.world import Outcome, endure

PATIENCE = 60.0
"""CPU-seconds of one trial, hundreds of times what it takes: a loop that awaits nothing stops the virtual clock."""


class Endless(AssertionError):
    """A trial computes for ever. The message says where."""


def outcome_of(trial: Trial, patience: float = PATIENCE) -> Outcome | BaseException:
    """What a trial did, or what ended it: the supervised boundary of a trial."""
    try:
        with _at_most(patience):
            return endure(trial)
    except Exception as error:  # whatever comes out of a trial is its failure, and is told with its seed
        return first(error)


def kind_of(outcome: Outcome | BaseException) -> str:
    """Failures that are alike: the class, and where in the program it was raised. "" for a trial that held."""
    if isinstance(outcome, Outcome):
        return ""
    frames = traceback.extract_tb(outcome.__traceback__)
    where = f" in {Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""
    return f"{type(outcome).__name__}{where}"


def described(outcome: Outcome | BaseException) -> str:
    """One line."""
    return "held" if isinstance(outcome, Outcome) else f"{kind_of(outcome)}: {outcome}"[:1000]


def command(trial: Trial) -> str:
    """That runs this trial again."""
    imports = "from asyncrl.faulty.plan import *; from asyncrl.faulty.world import *"
    return f'.venv/bin/python -c "{imports}; endure({trial!r})"'


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    def endless(number: int, frame: FrameType | None) -> None:
        where = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
        raise Endless(f"the trial computed for {seconds:g} s{where}")

    before = signal.signal(signal.SIGPROF, endless)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
