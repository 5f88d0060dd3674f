"""The table of failures: who failed, and when, decides what ends, and never which class an error has.

    Supervisor         starts and deaths of workers
    RunningFleet       errors of calls: a worker that ends for one is lost to its callers, as if it had died
    WeightPublisher    offers of weights that do not arrive

docs/reliability.md shows the same table.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from asyncrl.errors import (
    AlgorithmError,
    AsyncrlError,
    DeadlineExceeded,
    Refused,
    RemoteError,
    Retryable,
    RewardError,
    TaskError,
)


class Who(Enum):
    """Names who failed."""

    NEWCOMER = "a host or replica that joins a fleet which has run, or for which no start waits, until its first call"
    WORKER = "a worker that starts again alone: each replica of one rank, but for those that learn"
    RANK = "a rank of trainer, critic or another replica of several, where the run may go back to a checkpoint"
    FIXED = "such a rank where it may not (`fleet.trainer_restarts`), and a worker in the trainer's processes"


class When(Enum):
    """Names the moment at which it failed."""

    FIRST_START = "it starts, and the fleet has not run yet"
    START = "it starts later"
    CALL = "it raises any error, or dies, while it works"
    FETCH = "new weights reach it late, or not at all"
    EVERYWHERE = "the same at all replicas, or too often"


class Ends(Enum):
    """Names what ends, from least to most. All of it begins again, but for the run."""

    OFFER = "the offer: it is said why, tried again after a pause, and dropped after three starts that failed"
    WORKER = "the worker: another instance starts, and its groups begin again"
    REPLICA = "the replica's turn: it is named, left out of new work, and offered the weights again until it has them"
    RANK_SET = "all ranks that learn: the run goes back to its newest checkpoint"
    RUN = "the run, with exit status 75 and the command that resumes where there is a checkpoint"


TABLE = {
    Who.NEWCOMER: dict.fromkeys(When, Ends.OFFER),
    Who.WORKER: {
        When.FIRST_START: Ends.RUN,
        When.START: Ends.WORKER,
        When.CALL: Ends.WORKER,
        When.FETCH: Ends.REPLICA,
        When.EVERYWHERE: Ends.RUN,
    },
    Who.RANK: {
        When.FIRST_START: Ends.RUN,
        When.START: Ends.RANK_SET,
        When.CALL: Ends.RANK_SET,
        When.FETCH: Ends.RANK_SET,
        When.EVERYWHERE: Ends.RUN,
    },
    Who.FIXED: dict.fromkeys(When, Ends.RUN),
}

MISTAKES = (TaskError, RewardError, AlgorithmError)
"""Mistakes in the user's data and code, or of one host that lacks a file or package which they need: the next replica
shows which it is. Once each has raised one, the run ends with it."""

OPTIONAL_CALLS = frozenset({"health", "profile", "restore_rows", "texts"})
"""Calls whose callers go on without what they ask for: errors of these end nothing."""


def what_ends(who: Who, when: When) -> Ends:
    return TABLE[who][when]


def is_fault(error: BaseException) -> bool:
    """Returns whether an error is one of whoever raised it, and no sign that somebody else is gone, late, or further
    on."""
    return not isinstance(error, (Retryable, Refused, DeadlineExceeded))


def came_from_afar(error: AsyncrlError) -> bool:
    """Returns whether a worker raised the error; else it was raised here, about the worker or the connection to it."""
    return isinstance(error, RemoteError) or isinstance(error.__cause__, RemoteError)


@dataclass(frozen=True, slots=True)
class Raised:
    """An error that a replica raised and has not made good since: its next instance has not answered the same call.

    call: name of the endpoint. stem: the error without the numbers in it, of a mistake its first line. groups: for
    which the replica was called, of a mistake all that met one. times: in a row.
    """

    call: str
    stem: str
    groups: frozenset[int] = frozenset()
    times: int = 1
    is_mistake: bool = False

    @classmethod
    def of(cls, call: str, error: AsyncrlError, host: str = "", groups: Iterable[int] = ()) -> "Raised":
        """Returns the error of a call to a worker on this host, whose name its text may have."""
        kind = type(error).__name__
        text = str(error)
        if isinstance(error, RemoteError):
            kind = error.kind
            text = error.message
        if host:
            text = text.replace(host, "")
        is_mistake = isinstance(error, MISTAKES)
        if is_mistake:
            text = text.partition("\n")[0]  # What follows tells of one sample.
        return cls(call, re.sub(r"\d+", "#", f"{kind}: {text}"), frozenset(groups), is_mistake=is_mistake)

    def after(self, before: "Raised | None") -> "Raised":
        """Returns this error counted as the next one after an earlier one of the same replica."""
        if before is None or (before.call, before.is_mistake) != (self.call, self.is_mistake):
            return self
        if self.is_mistake:
            return replace(self, groups=self.groups | before.groups, times=before.times + 1)
        if before.stem != self.stem:
            return self
        return replace(self, groups=self.groups & before.groups, times=before.times + 1)


def is_everywhere(replicas: Iterable[Raised | None]) -> bool:
    """Returns whether all replicas raised the same. A mistake is the same by its first line, or when one group met
    mistakes at all of them. Any other error has to come twice at least, while they worked for no common group: of a
    group that was at each of them, crash attribution finds out whether it is to blame."""
    raised = list(replicas)
    known = [each for each in raised if each is not None]
    if len(known) < len(raised) or len({(each.call, each.is_mistake) for each in known}) != 1:
        return False
    is_same = len({each.stem for each in known}) == 1
    in_common = frozenset.intersection(*(e.groups for e in known))
    if known[0].is_mistake:
        return is_same or bool(in_common)
    return is_same and sum(each.times for each in known) > 1 and not in_common
