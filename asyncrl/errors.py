"""Every error that asyncrl raises on purpose.

AsyncrlError
├── Retryable: PeerLost, LostRows
├── JournalError: IllegalTransition, TrainedTwice
├── mistakes of the user: ConfigError, TaskError (EnvironmentFailed), RewardError, AlgorithmError, UnknownEndpoint
├── trouble between processes: DeadlineExceeded, Refused, WireError, RemoteError, ArenaFull, WeightsError
└── ends of a run: Interrupted, PolicyMismatch, TrainingStopped, NonFiniteLoss, OnlyTruncated, FleetFailed
"""

import re
from collections.abc import Iterable


class AsyncrlError(Exception):
    """Root of all errors of asyncrl. exit_code: of a command that ends with it; 75: the same command resumes the run.
    is_refusal: it came before the workers of a run were started, so that it is no end of the run."""

    exit_code = 1
    is_refusal = False

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that a notebook shows in place of a traceback, as a command prints them."""
        return f"{type(self).__name__}: {self}".splitlines()


class ConfigError(AsyncrlError, ValueError):
    """Reports a mistake of the user; the message says where it is and what to write instead."""

    exit_code = 2


class TaskError(AsyncrlError, ValueError):
    """Reports prompts that cannot be read; the message names the columns found and the closest one."""

    exit_code = 2


class EnvironmentFailed(TaskError):
    """Reports an environment that died, hung or raised; the message names sample and turn."""


class RewardError(AsyncrlError):
    """Reports a failed reward function; the message names function and sample."""

    exit_code = 2


class AlgorithmError(AsyncrlError):
    """Reports a failed custom algorithm; the message names the function and the line."""

    exit_code = 2


class UnknownEndpoint(AsyncrlError, AttributeError):
    """Reports an endpoint that the contract does not declare; the message names the closest one."""


class DeadlineExceeded(AsyncrlError):
    """Reports a wait that ran out; the message says what it waited for, how long, and who holds it. It is no
    TimeoutError: what came late from afar is never taken for the end of a wait here."""


class Retryable(AsyncrlError):
    """Reports a failure after which the same work may be done again, elsewhere or in a new attempt."""


class PeerLost(Retryable):
    """Reports a broken connection to a worker; every call outstanding on it raises this at once."""


ALL_SLOTS = -1
"""Stands in place of a slot for all rows of an owner."""


class LostRows(Retryable):
    """Reports that the rows behind a reference were freed or overwritten, or that their owner died.

    places: owner and slot of the lost rows, as far as they are known.
    """

    def __init__(self, message: str, places: Iterable[tuple[str, int]] = ()) -> None:
        super().__init__(message)
        self.places = tuple(places)


class Refused(AsyncrlError):
    """Reports a refusal for a wrong run, incarnation or version; the message names both sides."""


class WireError(AsyncrlError):
    """Reports bytes that are no valid message, or more of them than allowed."""


class RemoteError(AsyncrlError):
    """Reports an error that was raised in a worker, which service and rank name: "generation1", with the number of the
    replica, and 0.

    kind, message, remote_traceback: class name, text and traceback of the original error.
    """

    def __init__(self, kind: str, message: str, service: str, rank: int, remote_traceback: str) -> None:
        super().__init__(f"{service}[{rank}] raised {kind}: {message}")
        self.kind = kind
        self.service = service
        self.rank = rank
        self.message = message
        self.remote_traceback = remote_traceback


class ArenaFull(AsyncrlError):
    """Reports that a bounded arena has no free slot."""


class WeightsError(AsyncrlError):
    """Reports published weights that do not match their digest or specification, or that a reader cannot load."""


class JournalError(AsyncrlError):
    """Reports a journal or a checkpoint that contradicts itself."""


class IllegalTransition(JournalError):
    """Reports a sample that moved to a stage it cannot reach from its present one."""


class TrainedTwice(JournalError):
    """Reports a (group, member) that entered the loss a second time."""


class Interrupted(AsyncrlError):
    """Reports a run that a signal ended before a checkpoint of its last step; the message names the newest one."""

    exit_code = 130


class PolicyMismatch(AsyncrlError):
    """Reports a crossed bound of the section `[mismatch]`; the message names metric, value and bound."""


class TrainingStopped(AsyncrlError):
    """Reports training that comes to nothing, where a key of `[guards]` is "stop"; the message says what was seen."""


class NonFiniteLoss(AsyncrlError):
    """Reports three steps in a row that were not finite; the message names the samples."""


class OnlyTruncated(AsyncrlError):
    """Reports three steps in a row without a complete answer; the message names the keys to change."""


class FleetFailed(AsyncrlError):
    """Reports that the fleet cannot go on."""

    exit_code = 75


def errno_in(text: str) -> int | None:
    """Returns the errno of the last system error that a text mentions, in the notation of Python or of Rust."""
    numbers = re.findall(r"\[Errno (\d+)\]|\(os error (\d+)\)", text)
    return int("".join(numbers[-1])) if numbers else None
