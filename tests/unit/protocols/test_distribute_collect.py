"""Every row arrives where the protocol says and comes back in its place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.protocols.batch import Batch, BatchRef, Column, Cuts, RowRef
from asyncrl.protocols.distribute_collect import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_OF,
    ONE_TO_ALL,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    Transfer,
    balanced,
    balanced_parts,
    even_parts,
    fan_out,
)
from asyncrl.protocols.rank_layout import Layout
from tests.instruction_count import counting

SPLITTING = [THREE_D_PROTO, THREE_D_ALL_MICRO_DP, DP_PROTO]
EVERY_SPLIT = [*SPLITTING, *(balanced(transfer) for transfer in SPLITTING)]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    gpp = draw(st.integers(1, 2))
    gtp = draw(st.integers(1, 2))
    pp = gpp * draw(st.integers(1, 2))
    tp = gtp * draw(st.integers(1, 2))
    dp = draw(st.integers(1, 3))
    return Layout(pp, tp, dp, gpp, gtp)


def refs(lengths: Sequence[int]) -> BatchRef:
    return BatchRef(tuple(RowRef(row, 0, 0, 0, 2, length, 0, 0, "stop", ()) for row, length in enumerate(lengths)))


def answered(transfer: Transfer, layout: Layout, argument: Any) -> Any:
    """What a caller gets from an endpoint that answers each row with itself."""
    fan, calls = fan_out(transfer, (argument, "for all"), layout)
    assert len(calls) == layout.size
    assert all(rest == "for all" for _, rest in calls)
    return fan.join([calls[rank][0] for rank in fan.kept])


LENGTHS = st.lists(st.integers(1, 100), max_size=20)


@given(layouts(), LENGTHS, st.sampled_from([*EVERY_SPLIT, ONE_OF]))
def test_collecting_what_was_distributed_is_the_identity(
    layout: Layout, lengths: list[int], transfer: Transfer
) -> None:
    assert answered(transfer, layout, refs(lengths)) == refs(lengths)


@given(layouts(), LENGTHS, st.sampled_from(EVERY_SPLIT))
def test_kept_ranks_hold_every_row_once(layout: Layout, lengths: list[int], transfer: Transfer) -> None:
    fan, _ = fan_out(transfer, (refs(lengths),), layout)
    assert sorted(row for rank in fan.kept for row in fan.rows[rank]) == list(range(len(lengths)))


@given(layouts(), LENGTHS)
def test_a_data_group_shares_its_rows_and_its_last_stage_answers(layout: Layout, lengths: list[int]) -> None:
    fan, _ = fan_out(THREE_D_PROTO, (refs(lengths),), layout)
    for rank, rows in enumerate(fan.rows):
        assert rows == fan.rows[layout.rank(dp=layout.place(rank).dp)]
    assert [layout.place(rank) for rank in fan.kept] == [(layout.pp - 1, 0, index) for index in range(layout.dp)]


@given(layouts(), LENGTHS)
def test_ranks_that_generate_together_get_the_same_rows(layout: Layout, lengths: list[int]) -> None:
    fan, _ = fan_out(THREE_D_ALL_MICRO_DP, (refs(lengths),), layout)
    replicas = layout.generation_replicas()
    assert all(len({fan.rows[rank] for rank in group}) == 1 for group in replicas)
    assert list(fan.kept) == [group[0] for group in replicas]
    assert {len(group) for group in replicas} == {layout.gpp * layout.gtp}


@given(layouts(), LENGTHS, st.sampled_from([ONE_TO_ALL, THREE_D_PP_ONLY, ONE_OF]))
def test_broadcasts_give_every_rank_every_row(layout: Layout, lengths: list[int], transfer: Transfer) -> None:
    fan, calls = fan_out(transfer, (refs(lengths),), layout)
    assert all(call == (refs(lengths),) for call in calls)
    kept = {"ONE_TO_ALL": layout.size, "THREE_D_PP_ONLY": layout.pp, "ONE_OF": 1}
    assert len(fan.kept) == kept[transfer.name]


def test_names_of_stages_come_from_each_stage_once() -> None:
    layout = Layout(pp=3, tp=2, dp=2)
    fan, _ = fan_out(THREE_D_PP_ONLY, (), layout)
    assert fan.join([[f"layer {layout.place(rank).pp}"] for rank in fan.kept]) == ["layer 0", "layer 1", "layer 2"]


@given(layouts(), LENGTHS, st.sampled_from(EVERY_SPLIT))
def test_ragged_columns_come_back_in_their_order(layout: Layout, lengths: list[int], transfer: Transfer) -> None:
    tokens = [np.arange(length, dtype=np.int32) + row for row, length in enumerate(lengths)]
    batch = answered(transfer, layout, Batch({"tokens": Column.of(tokens)}))
    assert [row.tolist() for row in batch["tokens"]] == [row.tolist() for row in tokens]


def test_lists_with_one_value_a_row_come_back_in_order_and_others_by_rank() -> None:
    fan, calls = fan_out(balanced(DP_PROTO), (refs([9, 8, 2, 1]),), Layout(dp=2))
    scored = [[row.tokens for row in calls[rank][0]] for rank in fan.kept]
    assert scored == [[9, 1], [8, 2]]
    assert fan.join(scored) == [9, 8, 2, 1]
    assert fan.join([["a"], ["b"]]) == ["a", "b"]


def test_cuts_keep_the_denominators_of_the_whole_batch() -> None:
    cuts = Cuts(0, 3, refs([5, 1, 1, 1]), tokens=8, samples=4)
    _, calls = fan_out(balanced(THREE_D_PROTO), (cuts,), Layout(dp=2))
    assert [[row.tokens for row in call[0].batch] for call in calls] == [[5], [1, 1, 1]]
    assert {(call[0].tokens, call[0].samples, call[0].version) for call in calls} == {(8, 4, 3)}


@dataclass(frozen=True)
class Report:
    ranks: int

    @classmethod
    def merge(cls, parts: list["Report"]) -> "Report":
        return cls(sum(part.ranks for part in parts))


def test_answers_are_merged_by_their_type_or_refused() -> None:
    fan, _ = fan_out(ONE_TO_ALL, ("anything",), Layout(dp=3))
    assert fan.join([Report(1)] * 3) == Report(3)
    assert fan.join([None] * 3) is None
    with pytest.raises(TypeError, match="float cannot be joined"):
        fan.join([1.0] * 3)
    alone, _ = fan_out(ONE_TO_ALL, (), Layout())
    assert alone.join([1.0]) == 1.0


def test_a_rank_that_loses_rows_is_found() -> None:
    fan, calls = fan_out(DP_PROTO, (refs([1, 2, 3]),), Layout(dp=2))
    with pytest.raises(ValueError, match=r"by rank: \{0: \(2, 1\), 1: \(1, 1\)\}"):
        fan.join([calls[0][0].take([0]), calls[1][0]])


def test_arguments_of_one_call_have_the_same_rows() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        fan_out(DP_PROTO, (refs([1, 2]), refs([1, 2, 3])), Layout(dp=2))


def test_all_to_all_takes_one_value_a_rank_and_lists_the_answers() -> None:
    fan, calls = fan_out(ALL_TO_ALL, (["a", "b"], [1, 2]), Layout(dp=2))
    assert calls == [("a", 1), ("b", 2)]
    assert fan.join([None, 5]) == [None, 5]
    with pytest.raises(ValueError, match="one value for each of 2 ranks"):
        fan_out(ALL_TO_ALL, (["a"],), Layout(dp=2))


@given(st.integers(1, 5), LENGTHS)
def test_a_users_own_pair_is_served(ranks: int, lengths: list[int]) -> None:
    def round_robin(weights: Sequence[int], layout: Layout) -> list[Sequence[int]]:
        return [range(rank, len(weights), layout.size) for rank in range(layout.size)]

    own = Transfer("ROUND_ROBIN", round_robin, lambda layout: list(reversed(range(layout.size))))
    assert answered(own, Layout(dp=ranks), refs(lengths)) == refs(lengths)
    assert answered(balanced(own), Layout(dp=ranks), refs(lengths)) == refs(lengths)


@given(LENGTHS, st.integers(1, 6))
def test_parts_are_as_even_as_rows_allow(weights: list[int], parts: int) -> None:
    for split in (even_parts(weights, parts), balanced_parts(weights, parts)):
        assert len(split) == parts
        assert sorted(row for part in split for row in part) == list(range(len(weights)))
        assert len(weights) < parts or all(split)
    sizes = [len(part) for part in even_parts(weights, parts)]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 6))
def test_balanced_parts_differ_by_no_more_than_a_row(weights: list[int], parts: int) -> None:
    loads = [sum(weights[row] for row in part) for part in balanced_parts(weights, parts)]
    assert max(loads) - min(loads) <= max(weights, default=0)


def test_a_balanced_protocol_says_so_in_its_name() -> None:
    assert balanced(THREE_D_PROTO).name == "balanced THREE_D_PROTO"


def test_splitting_a_batch_costs_no_more_for_many_ranks() -> None:
    few, many = (_instructions_to_split(ranks) for ranks in (8, 512))
    assert many <= 1.5 * few, "the work grows with rows, and not with rows times ranks"


def _instructions_to_split(ranks: int) -> int:
    rows = refs([10 + row % 97 for row in range(8192)])
    step = balanced(THREE_D_PROTO)
    fan_out(step, (rows,), Layout(dp=ranks))  # What depends on the layout alone is remembered.
    with counting() as count:
        fan_out(step, (rows,), Layout(dp=ranks))
    return count.instructions
