"""Arguments split over the ranks of a call, and their answers put together again. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.protocols.batch import Divisible
from asyncrl.protocols.layout import Layout
from asyncrl.protocols.transfer import Transfer

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Shares:
    """What each rank of a call gets.

    args: one tuple a rank. rows: which rows of the divisible arguments each rank got; None when there are no such.
    """

    args: list[Arguments]
    rows: list[Sequence[int]] | None

    @property
    def broadcast(self) -> bool:
        """Every rank got everything."""
        return self.rows is None or all(list(rows) == list(range(self._count)) for rows in self.rows)

    @property
    def _count(self) -> int:
        return 1 + max((row for rows in self.rows or () for row in rows), default=-1)

    def order(self, ranks: Sequence[int]) -> list[int] | None:
        """The rows in the order in which these ranks' answers hold them; None when answers are not one to a row."""
        if self.rows is None:
            return None
        order = [row for rank in ranks for row in self.rows[rank]]
        return order if sorted(order) == list(range(self._count)) else None


def shares(transfer: Transfer, layout: Layout, args: Arguments) -> Shares:
    """Split the divisible arguments by rows as `transfer` says; every rank gets the others whole.

    Raises:
        ValueError: divisible arguments with different numbers of rows.
    """
    divisible = [arg for arg in args if isinstance(arg, Divisible)]
    if not divisible:
        return Shares([args] * layout.size, None)
    if len({len(arg) for arg in divisible}) > 1:
        raise ValueError(f"arguments of one call differ in their number of rows: {[len(arg) for arg in divisible]}")
    rows = [list(share) for share in transfer.distribute(divisible[0].row_weights(), layout)]
    return Shares([_take(args, share) for share in rows], list(rows))


def _take(args: Arguments, rows: list[int]) -> Arguments:
    return tuple(_rows_of(arg, rows) if isinstance(arg, Divisible) else arg for arg in args)


def _rows_of(arg: Divisible, rows: list[int]) -> Divisible:
    return arg if rows == list(range(len(arg))) else arg.take(rows)


def join(parts: Sequence[Any], order: Sequence[int] | None = None) -> Any:
    """One result of the answers of all ranks: rows and lists in the order of the call's rows, messages merged.

    Args:
        order: the row that each row of the joined answers belongs to, see `Shares.order`.
    """
    if isinstance(parts[0], Divisible):
        return _in_order(type(parts[0]).join(parts), order)
    if isinstance(parts[0], list):
        return _list_in_order([item for part in parts for item in part], order)
    if len(parts) == 1 or all(part is None for part in parts):
        return parts[0]
    assert hasattr(parts[0], "merge"), f"answers of type {type(parts[0]).__name__} need a classmethod `merge`"
    return type(parts[0]).merge(list(parts))


def _in_order(joined: Divisible, order: Sequence[int] | None) -> Divisible:
    if order is None or len(joined) != len(order) or list(order) == list(range(len(order))):
        return joined
    return joined.take(_inverse(order))


def _list_in_order(joined: list[Any], order: Sequence[int] | None) -> list[Any]:
    if order is None or len(joined) != len(order):
        return joined
    return [joined[position] for position in _inverse(order)]


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
