"""Every error that asyncrl raises on purpose.

AsyncrlError
├── ConfigError            a mistake in a config, a flag or an argument (also a ValueError)
├── TaskError              prompts that cannot be read or lack a column (also a ValueError)
├── RewardError            a reward function failed, hung or returned something that is no reward
├── AlgorithmError         a custom algorithm raised, or left out what an algorithm must do
├── UnknownEndpoint        a handle was asked for an endpoint that its contract does not declare
├── DeadlineExceeded       a wait ran out; names what it waited for and who holds it (also a TimeoutError)
├── Retryable              the same work may be done again, elsewhere or in a new attempt
│   ├── PeerLost           a connection broke, or the worker behind it died
│   └── LostRows           rows behind a reference were freed, or their owner died
├── Refused                a handshake or a step was refused: wrong run, incarnation or version, both named
├── WireError              bytes that are no valid message, or more of them than allowed
├── RemoteError            an error raised in another process: type, message, service, rank, traceback
├── ArenaFull              a bounded arena has no free slot: more was admitted than fits
├── WeightsError           published weights do not match their digest or specification
├── JournalError           the journal or a checkpoint contradicts itself
│   ├── IllegalTransition  a sample moved to a stage that it cannot reach
│   └── TrainedTwice       a (group, member) entered the loss a second time
├── Interrupted            a signal ended the run before its checkpoint; names the newest one and how to resume
├── PolicyMismatch         the policy that sampled and the one that trains differ by more than the config allows
├── NonFiniteLoss          three training steps in a row had a loss or gradient that is not finite
├── OnlyTruncated          three training steps in a row had only answers that algorithm.mask_truncated leaves out
└── FleetFailed            the fleet cannot go on; carries the exit code and the command that resumes
"""

import re
from collections.abc import Iterator


class AsyncrlError(Exception):
    """Root of all errors of asyncrl."""


class ConfigError(AsyncrlError, ValueError):
    """Reports a mistake of the user; the message says where it is and what to write instead."""


class TaskError(AsyncrlError, ValueError):
    """Reports prompts that cannot be read; the message names the columns found and the closest one."""


class RewardError(AsyncrlError):
    """Reports a failed reward function; the message names function and sample."""


class AlgorithmError(AsyncrlError):
    """Reports a failed custom algorithm; the message names the function and the line."""


class UnknownEndpoint(AsyncrlError, AttributeError):
    """Reports an endpoint that the contract does not declare; the message names the closest one."""


class DeadlineExceeded(AsyncrlError, TimeoutError):
    """Reports a wait that ran out; the message says what it waited for, how long, and who holds it."""


class Retryable(AsyncrlError):
    """Reports a failure after which the same work may be done again, elsewhere or in a new attempt."""


class PeerLost(Retryable):
    """Reports a broken connection to a worker; every call outstanding on it raises this at once."""


class LostRows(Retryable):
    """Reports that the rows behind a reference were freed or overwritten, or that their owner died."""


class Refused(AsyncrlError):
    """Reports a refusal for a wrong run, incarnation or version; the message names both sides."""


class WireError(AsyncrlError):
    """Reports bytes that are no valid message, or more of them than allowed."""


class RemoteError(AsyncrlError):
    """Reports an error that was raised in a worker.

    Attributes:
        kind: class name of the original error.
        service, rank: worker that raised it.
        message: text of the original error.
        remote_traceback: its traceback as text.
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


class PolicyMismatch(AsyncrlError):
    """Reports a crossed bound of the section `[mismatch]`; the message names metric, value and bound."""


class NonFiniteLoss(AsyncrlError):
    """Reports three steps in a row that were not finite; the message names the samples."""


class OnlyTruncated(AsyncrlError):
    """Reports three steps in a row without a complete answer; the message names the keys to change."""


class FleetFailed(AsyncrlError):
    """Reports that the fleet cannot go on.

    Attributes:
        exit_code: exit status of the command (75: the same command resumes the run).
    """

    def __init__(self, message: str, exit_code: int = 75) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def errno_in(text: str) -> int | None:
    """Returns the errno of the last system error that a text mentions, in the notation of Python or of Rust."""
    numbers = re.findall(r"\[Errno (\d+)\]|\(os error (\d+)\)", text)
    return int("".join(numbers[-1])) if numbers else None


def unwrap(error: BaseException) -> BaseException:
    """Returns the only error inside nested groups; the error itself when it is no group or holds several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def root_cause(error: BaseException) -> BaseException:
    """Returns the error to report of those inside nested groups: the first that is not Retryable, else the first.

    A Retryable error follows from other errors more often than it causes them.
    """
    leaves = list(_leaves(error))
    return next((leaf for leaf in leaves if not isinstance(leaf, Retryable)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error
