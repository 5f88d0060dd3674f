"""Every error asyncrl raises on purpose.

AsyncrlError
├── ConfigError            the user's mistake in a config, a flag or an argument (also a ValueError)
├── TaskError              prompts that cannot be read or lack a column (also a ValueError)
├── RewardError            a reward function failed, hung or returned what is no reward
├── PageError              a page of the user's own raised, or left undone what a page has to do
├── UnknownEndpoint        a handle was asked for an endpoint its contract does not declare
├── DeadlineExceeded       a wait ran out; names what it waited for and who holds it (also a TimeoutError)
├── Retryable              the work may be done again elsewhere
│   ├── PeerLost           a link broke, or the worker behind it died
│   └── LostRows           rows behind a reference were freed, or their owner died
├── Refused                a handshake or a step was refused: wrong run, epoch or version, both named
├── WireError              bytes that are no message of ours, or larger than the declared bound
├── RemoteError            an error raised in another process: type, message, service, rank, traceback
├── ArenaFull              a bounded arena has no free slot: the admission rule was broken
├── WeightsError           a published version does not match its digest or specification
├── JournalError           the journal or a checkpoint contradicts itself
│   ├── IllegalTransition  a sample moved to a stage it cannot reach from where it is
│   └── TrainedTwice       a (group, member) entered the loss a second time
├── Interrupted            a signal ended the run before its checkpoint; names the newest one and the command to go on
├── PolicyMismatch         the policy that sampled and the one that trains are further apart than the config allows
├── NonFiniteLoss          three training steps in a row had a loss or gradient that is not finite
├── OnlyTruncated          three training steps in a row had only answers that algorithm.mask_truncated leaves out
└── FleetFailed            the fleet cannot go on; carries the exit code and the command that resumes
"""

import re
from collections.abc import Iterator


class AsyncrlError(Exception):
    """Root of the tree above."""


class ConfigError(AsyncrlError, ValueError):
    """The user's mistake; the message says where it is and what to write instead."""


class TaskError(AsyncrlError, ValueError):
    """Prompts that cannot be read; the message names the columns found and the closest one."""


class RewardError(AsyncrlError):
    """A reward function failed; the message names function and sample."""


class PageError(AsyncrlError):
    """The user's own page failed; the message names the function, and where in it."""


class UnknownEndpoint(AsyncrlError, AttributeError):
    """The contract declares no such endpoint; the message names the nearest."""


class DeadlineExceeded(AsyncrlError, TimeoutError):
    """A wait ran out; the message says what it waited for, how long, and who holds it."""


class Retryable(AsyncrlError):
    """The same work may be done again, elsewhere or in a new attempt."""


class PeerLost(Retryable):
    """The link to a worker broke; every call outstanding on it fails with this, at once."""


class LostRows(Retryable):
    """Rows behind a reference are gone: freed, overwritten, or their owner died."""


class Refused(AsyncrlError):
    """A peer refused: wrong run, epoch or version; the message names both sides."""


class WireError(AsyncrlError):
    """Bytes that are no message of ours, or larger than what was declared."""


class RemoteError(AsyncrlError):
    """An error raised in a worker.

    Attributes:
        kind: class name of the original error.
        service, rank: where it was raised.
        remote_traceback: its traceback as text.
    """

    def __init__(self, kind: str, message: str, service: str, rank: int, remote_traceback: str) -> None:
        super().__init__(f"{service}[{rank}] raised {kind}: {message}")
        self.kind, self.service, self.rank = kind, service, rank
        self.message, self.remote_traceback = message, remote_traceback


class ArenaFull(AsyncrlError):
    """No free slot in a bounded arena."""


class WeightsError(AsyncrlError):
    """Published weights that do not match their digest or specification, or that a reader cannot take over."""


class JournalError(AsyncrlError):
    """The journal or a checkpoint contradicts itself."""


class IllegalTransition(JournalError):
    """A sample moved to a stage that it cannot reach from where it is."""


class TrainedTwice(JournalError):
    """A (group, member) entered the loss a second time."""


class Interrupted(AsyncrlError):
    """A signal ended the run before a checkpoint of its last step; the message names the newest one there is."""


class PolicyMismatch(AsyncrlError):
    """A bound of the section `[mismatch]` was crossed; the message names metric, value and bound."""


class NonFiniteLoss(AsyncrlError):
    """Three steps in a row were not finite; the message names the samples."""


class OnlyTruncated(AsyncrlError):
    """Three steps in a row had no answer that came to its end; the message names the keys to change."""


class FleetFailed(AsyncrlError):
    """The fleet cannot go on.

    Attributes:
        exit_code: what the command exits with (75: the same command resumes the run).
    """

    def __init__(self, message: str, exit_code: int = 75) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def system_error_in(text: str) -> int | None:
    """The errno of the last failure of the operating system that a text tells of, in the words of Python or of Rust."""
    numbers = re.findall(r"\[Errno (\d+)\]|\(os error (\d+)\)", text)
    return int("".join(numbers[-1])) if numbers else None


def lone(error: BaseException) -> BaseException:
    """The one error inside nested groups; the error itself when it is no group or holds several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def first(error: BaseException) -> BaseException:
    """The one to tell of errors that came together: the first inside nested groups, but rather one that is not
    Retryable, which more often follows from other errors than it causes them."""
    leaves = list(_leaves(error))
    return next((leaf for leaf in leaves if not isinstance(leaf, Retryable)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error
