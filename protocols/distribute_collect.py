"""Transfer protocols: how a call fans out over the workers of a service, and how the answers come back.

A protocol is a pair of pure functions over row indices and a layout (HybridFlow, EuroSys 2025, Table 3). A handle uses
it so:

    fan, calls = fan_out(transfer, args, layout)          # calls[rank]: the arguments of that rank
    answers = [... of every rank ...]
    result = fan.join([answers[rank] for rank in fan.kept])

- Every rank is called, also one that gets no rows: ranks of one model take part in collectives together.
- Divisible arguments (Batch, BatchRef, Cuts) are split by rows, all by the same rows, weighed by the first; any other
  argument goes to every rank as it is.
- A service of several replicas is one layout per replica. ONE_OF picks a replica and fans out inside it; DP_PROTO over
  replicas of one rank each is a fan over `Layout(dp=replicas)`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapreplace
from itertools import pairwise
from typing import Any

from asyncrl.protocols.batch import is_divisible
from asyncrl.protocols.rank_layout import Layout

Rows = Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """distribute(row weights, layout) -> rows of each rank; collect(layout) -> ranks whose answers are kept, in order.

    one_of: the whole call goes to a single replica, which the runtime chooses; by_group: to the same one as the running
    calls of its group; by_holder: to the one that made the newest rows of the samples it goes on with. to_holders: it
    goes to the replicas that hold rows of the samples in its first argument.
    per_rank: the caller passes one value for each rank in every argument, and gets the list of all answers.
    """

    name: str
    distribute: Callable[[Sequence[int], Layout], list[Rows]]
    collect: Callable[[Layout], list[int]]
    one_of: bool = False
    by_group: bool = False
    by_holder: bool = False
    to_holders: bool = False
    per_rank: bool = False


@dataclass(frozen=True, slots=True)
class Fan:
    """Describes how one call goes out and comes back. rows: of each rank; kept: ranks whose answers are kept, in order;
    count: rows of the call, None without an argument that can be split; gather: answers are listed, not joined."""

    rows: tuple[tuple[int, ...], ...]
    kept: tuple[int, ...]
    count: int | None
    gather: bool = False

    def join(self, answers: Sequence[Any]) -> Any:
        """Returns one result from the answers of the kept ranks, given in the order of `kept`.

        A type with a `merge` class method is merged by it, divisible values are joined, lists are concatenated. Rows
        that were split over the kept ranks come back in the caller's order; a list of something else than one value a
        row stays in the order of `kept`. Raises TypeError for several answers of a type that cannot be joined,
        ValueError when a rank answered another number of rows than it was given.
        """
        assert len(answers) == len(self.kept), f"{len(answers)} answers of {len(self.kept)} ranks"
        first = answers[0]
        if self.gather:
            return list(answers)
        if len(answers) == 1 and not hasattr(type(first), "merge"):
            return first
        if all(answer is None for answer in answers):
            return None
        if hasattr(type(first), "merge"):
            return type(first).merge(list(answers))
        if isinstance(first, list):
            return self._in_order([row for answer in answers for row in answer], answers)
        if is_divisible(first):
            return self._in_order(type(first).join(answers), answers)
        raise TypeError(f"answers of type {type(first).__name__} cannot be joined: give it a class method `merge`")

    def _in_order(self, joined: Any, answers: Sequence[Any]) -> Any:
        sent = [row for rank in self.kept for row in self.rows[rank]]
        split = self.count is not None and len(self.kept) > 1 and sorted(sent) == list(range(self.count))
        if not split:
            return joined
        sizes = {rank: (len(self.rows[rank]), len(answer)) for rank, answer in zip(self.kept, answers, strict=True)}
        if all(given == answered for given, answered in sizes.values()):
            order = sorted(range(len(sent)), key=sent.__getitem__)
            return [joined[place] for place in order] if isinstance(joined, list) else joined.take(order)
        if isinstance(joined, list):
            return joined
        raise ValueError(f"rows given and answered differ, by rank: {sizes}; answer every row, in the order given")


def fan_out(transfer: Transfer, args: Sequence[Any], layout: Layout) -> tuple[Fan, list[tuple[Any, ...]]]:
    """Returns the fan of one call and each rank's arguments. Raises ValueError for arguments that differ in their rows,
    or, with `per_rank`, have another number of values than there are ranks."""
    if transfer.per_rank:
        if any(len(argument) != layout.size for argument in args):
            given = [len(argument) for argument in args]
            raise ValueError(
                f"{transfer.name} wants one value for each of {layout.size} ranks in every argument, not {given}"
            )
        fan = Fan(((),) * layout.size, tuple(transfer.collect(layout)), None, gather=True)
        return fan, [tuple(argument[rank] for argument in args) for rank in range(layout.size)]
    divisible = [argument for argument in args if is_divisible(argument)]
    if len(divisible) > 1 and len({len(argument) for argument in divisible}) > 1:
        raise ValueError(f"arguments to split differ in their rows: {[len(argument) for argument in divisible]}")
    if not divisible or (transfer.one_of and layout.size == 1):
        return _undivided(transfer, layout), [tuple(args)] * layout.size
    weights = divisible[0].row_weights()
    fan = _fan(transfer, weights, layout, len(weights))
    taken: dict[tuple[int, ...], tuple[Any, ...]] = {}  # Ranks that share their rows share one copy of the arguments.
    return fan, [taken.get(part) or taken.setdefault(part, _taken(args, part)) for part in fan.rows]


def _fan(transfer: Transfer, weights: Sequence[int], layout: Layout, count: int | None) -> Fan:
    rows = transfer.distribute(weights, layout)
    assert len(rows) == layout.size, f"{transfer.name} distributes to {len(rows)} of {layout.size} ranks"
    return Fan(tuple(map(tuple, rows)), tuple(transfer.collect(layout)), count)


@lru_cache(maxsize=256)
def _undivided(transfer: Transfer, layout: Layout) -> Fan:
    """Returns the fan of a call that is not split; cached, one for each protocol and layout in use."""
    return _fan(transfer, (), layout, None)


def _taken(args: Sequence[Any], rows: Rows) -> tuple[Any, ...]:
    return tuple([_part(argument, rows) for argument in args])


def _part(argument: Any, rows: Rows) -> Any:
    """Takes rows of an argument; all rows in order are the argument itself, without a copy."""
    if not is_divisible(argument) or (len(rows) == len(argument) and list(rows) == list(range(len(argument)))):
        return argument
    return argument.take(rows)


# ---- splitting rows --------------------------------------------------------------------------------------


def even_parts(weights: Sequence[int], parts: int) -> list[Rows]:
    """Returns consecutive ranges whose lengths differ by at most one, the longer ones first."""
    short, longer = divmod(len(weights), parts)
    starts = [part * short + min(part, longer) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def balanced_parts(weights: Sequence[int], parts: int) -> list[Rows]:
    """Returns parts of about equal weight, rows rising in each: heaviest row first, to the lightest part. The heaviest
    is at most 4/3 of the best possible (Graham 1969); with as many rows as parts or more none is empty."""
    rows: list[list[int]] = [[] for _ in range(parts)]
    # A heap of (load, number of rows, part), each as one number, because a heap of numbers is twice as fast.
    lightest_first = list(range(parts))
    one_token = (len(weights) + 1) * parts
    for row in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):  # Equal weights keep their order.
        lightest = lightest_first[0]
        rows[lightest % parts].append(row)
        heapreplace(lightest_first, lightest + weights[row] * one_token + parts)
    return [sorted(part) for part in rows]


def balanced(transfer: Transfer) -> Transfer:
    """Returns the same protocol, with rows split by weight (tokens) instead of by number."""

    @lru_cache(maxsize=256)
    def part_numbers(layout: Layout) -> tuple[int, ...]:
        """Returns the part of each rank. The protocol itself tells which ranks share one, from a row for each rank."""
        probe = [tuple(rows) for rows in transfer.distribute([1] * layout.size, layout)]
        numbers = {rows: number for number, rows in enumerate(dict.fromkeys(probe))}
        return tuple(numbers[rows] for rows in probe)

    def distribute(weights: Sequence[int], layout: Layout) -> list[Rows]:
        numbers = part_numbers(layout)
        split = balanced_parts(weights, max(numbers) + 1)
        return [split[number] for number in numbers]

    return replace(transfer, name=f"balanced {transfer.name}", distribute=distribute)


# ---- the protocols of Table 3 ----------------------------------------------------------------------------


def _to_everyone(weights: Sequence[int], layout: Layout) -> list[Rows]:
    return [range(len(weights))] * layout.size


def _by_data_index(weights: Sequence[int], layout: Layout) -> list[Rows]:
    parts = even_parts(weights, layout.data)
    return [parts[layout.place(rank).dp] for rank in range(layout.size)]


def _by_generation_replica(weights: Sequence[int], layout: Layout) -> list[Rows]:
    replicas = layout.generation_replicas()
    parts = even_parts(weights, len(replicas))
    owner = {rank: part for group, part in zip(replicas, parts, strict=True) for rank in group}
    return [owner[rank] for rank in range(layout.size)]


def _all_ranks(layout: Layout) -> list[int]:
    return list(range(layout.size))


ONE_TO_ALL = Transfer("ONE_TO_ALL", _to_everyone, _all_ranks)
"""Gives all ranks the same input, and keeps the answers of all."""

ONE_OF = Transfer("ONE_OF", _to_everyone, lambda layout: [layout.rank(pp=-1)], one_of=True)
"""The whole call to one replica, the answer of its last pipeline stage. Not in Table 3."""

ONE_OF_BY_GROUP = replace(ONE_OF, name="ONE_OF_BY_GROUP", by_group=True)
"""The whole call to the replica that runs other calls of its group, so that its samples meet; else as ONE_OF. Not in
Table 3."""

ONE_OF_HOLDER = replace(ONE_OF, name="ONE_OF_HOLDER", by_holder=True)
"""The whole call to the replica that made the newest rows of its samples, if it lives; else as ONE_OF, also for a call
that continues nothing. Not in Table 3."""

TO_HOLDERS = Transfer("TO_HOLDERS", _to_everyone, _all_ranks, to_holders=True)
"""Each replica gets the samples whose rows it may hold; the answers of all, those without rows are not called. Not in
Table 3."""

THREE_D_PROTO = Transfer(
    "THREE_D_PROTO", _by_data_index, lambda layout: [layout.rank(pp=-1, dp=index) for index in range(layout.data)]
)
"""Split over data groups, the same rows inside each; the answers of each group's last stage, first tensor rank."""

THREE_D_ALL_MICRO_DP = Transfer(
    "THREE_D_ALL_MICRO_DP",
    _by_generation_replica,
    lambda layout: [ranks[0] for ranks in layout.generation_replicas()],
)
"""Split over the micro-data-parallel replicas of generation, the same rows inside each; the answers of each one's
first rank. The table's "micro DP group" is read as the ranks that generate together: they must see the same rows."""

THREE_D_PP_ONLY = Transfer(
    "THREE_D_PP_ONLY", _to_everyone, lambda layout: [layout.rank(pp=index) for index in range(layout.pp)]
)
"""Gives all ranks the same input, and keeps the answers of each pipeline stage's first tensor and data rank."""

DP_PROTO = Transfer("DP_PROTO", lambda weights, layout: even_parts(weights, layout.size), _all_ranks)
"""Split over all ranks, each a data-parallel one; the answers of all."""

ALL_TO_ALL = Transfer("ALL_TO_ALL", _to_everyone, _all_ranks, per_rank=True)
"""One input of the caller's for each rank; the list of all answers. For debugging."""
