"""Rows of prompts on one connection: the samples of a group are scored in calls of their own, and its row travels once.

    sender      SentRows.shorten      leaves out the bytes of a row that was sent before
    receiver    ReceivedRows.restore  puts them back by the digest of the row

Both sides know the same rows, because they take in the same calls in the same order, and forget the oldest row first.
"""

from typing import Any

import numpy as np

from asyncrl.errors import WireError
from asyncrl.protocols.messages import Call
from asyncrl.protocols.prompt_row import PackedRow, PromptRow

KEPT_BYTES = 16 * 2**20
"""Bytes of rows that a receiver keeps for one connection: 160 rows of 100 kB. A row that it forgot travels again."""

SHORTEST = 256
"""Bytes from which a row is left out: a shorter one costs little more than its digest."""

_NO_BYTES = np.zeros(0, np.uint8)


class _KnownRows:
    """Rows by their digests, each with the size of its bytes, which the sender does not keep."""

    def __init__(self) -> None:
        self._rows: dict[bytes, tuple[int, PackedRow]] = {}
        self._bytes = 0

    def _add(self, size: int, row: PackedRow) -> None:
        if row.digest in self._rows or not SHORTEST <= size <= KEPT_BYTES:
            return
        self._rows[row.digest] = size, row
        self._bytes += size
        while self._bytes > KEPT_BYTES:
            oldest = next(iter(self._rows))
            self._bytes -= self._rows.pop(oldest)[0]


class SentRows(_KnownRows):
    """The rows that the other side knows."""

    def shorten(self, call: Call) -> Call:
        """Returns the call without the bytes of known rows."""
        return _with_args(call, [arg if (row := row_of(arg)) is None else self._shortened(row) for arg in call.args])

    def _shortened(self, row: PackedRow) -> PackedRow:
        return self._rows[row.digest][1] if row.digest in self._rows else row

    def add(self, call: Call) -> None:
        """Takes in a call once it was sent."""
        for row in filter(None, map(row_of, call.args)):
            self._add(len(row.data), PackedRow(row.digest, _NO_BYTES))


class ReceivedRows(_KnownRows):
    """The rows that came, with their bytes."""

    def restore(self, call: Call) -> Call:
        """Returns the call with all bytes. Raises WireError for a row whose bytes the other side has never sent."""
        call = _with_args(call, [self._restored(arg) if type(arg) is PackedRow else arg for arg in call.args])
        for row in filter(None, map(row_of, call.args)):
            self._add(len(row.data), row)
        return call

    def _restored(self, row: PackedRow) -> PackedRow:
        if len(row.data):
            return row
        if row.digest not in self._rows:
            raise WireError(f"a call names the row {row.digest.hex()[:16]} of a prompt, whose bytes never came")
        return self._rows[row.digest][1]


def has_rows(message: Any) -> bool:
    return type(message) is Call and any([type(arg) in (PromptRow, PackedRow) for arg in message.args])


def _with_args(call: Call, args: list[Any]) -> Call:
    return Call(call.call, call.method, tuple(args), call.deadline, call.wants_answer)


def row_of(argument: Any) -> PackedRow | None:
    """Returns the row as it is sent, None for another argument. Raises WireError for a row that cannot be sent."""
    if type(argument) is not PromptRow:
        return argument if type(argument) is PackedRow else None
    try:
        return argument.packed
    except (ValueError, OverflowError, TypeError) as error:
        raise WireError(f"the row of a prompt cannot be sent: {error}") from error
