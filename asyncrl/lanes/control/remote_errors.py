"""Errors as they cross a wire: a worker sends a `Failure`, and its caller raises the error that it describes."""

import re
import traceback

from asyncrl import errors
from asyncrl.concurrency import unwrap
from asyncrl.errors import AsyncrlError, LostRows, RemoteError
from asyncrl.protocols.messages import Failure, Hello

TRACEBACK_CHARACTERS = 16_384
MESSAGE_CHARACTERS = 4_096


def failure_from(raised: BaseException, call: int, worker: Hello) -> Failure:
    """Returns the reply of `worker` to a call that raised this."""
    error = unwrap(raised)
    trace = "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:]
    return Failure(
        call=call,
        kind=type(error).__name__,
        message=_sendable(str(error)[:MESSAGE_CHARACTERS]),
        service=f"{worker.service}{_replica_of(worker)}",
        rank=worker.rank,
        traceback=_sendable(trace),
        lost=error.places if isinstance(error, LostRows) else (),
    )


def error_from(failure: Failure) -> AsyncrlError:
    """Returns the error to raise: the class of asyncrl.errors with that name, caused by a RemoteError, or that."""
    remote = RemoteError(failure.kind, failure.message, failure.service, failure.rank, failure.traceback)
    cls = getattr(errors, failure.kind, None)
    if not (isinstance(cls, type) and issubclass(cls, AsyncrlError)) or cls is RemoteError:
        return remote
    error: AsyncrlError = cls(f"{failure.service}[{failure.rank}]: {failure.message}")
    if isinstance(error, LostRows):
        error.places = failure.lost
    error.__cause__ = remote
    return error


def _replica_of(worker: Hello) -> str:
    """Returns the number of the replica in the name of an instance ("reward1.0-0-feedbeef"), "" where it has none."""
    named = re.match(rf"{re.escape(worker.service)}(\d+)\.{worker.rank}-", worker.instance)
    return named[1] if named else ""


def _sendable(text: str) -> str:
    """Returns the text without lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
