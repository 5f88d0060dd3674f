from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.joining import join, shares
from asyncrl.protocols.batch import Batch
from asyncrl.protocols.layout import Layout
from asyncrl.protocols.messages import Boundary
from asyncrl.protocols.transfer import Rows, Transfer


def numbers(values: list[int]) -> Batch:
    return Batch.of(number=[np.array([value], np.int64) for value in values])


def values_of(batch: Batch) -> list[int]:
    return [int(row[0]) for row in batch["number"]]


def striped(weights: object, layout: Layout) -> list[Rows]:
    count = len(weights)  # type: ignore[arg-type]
    return [list(range(rank, count, layout.size)) for rank in range(layout.size)]


STRIPED = Transfer("STRIPED", striped, lambda layout: list(range(layout.size)))
TO_ALL = Transfer(
    "TO_ALL", lambda weights, layout: [range(len(weights))] * layout.size, lambda layout: list(range(layout.size))
)


@given(st.lists(st.integers(0, 99), max_size=12), st.integers(1, 5))
def test_rows_split_and_joined_come_back_in_their_order(values: list[int], ranks: int) -> None:
    parts = shares(STRIPED, Layout(dp=ranks), (numbers(values), "same for all"))
    assert all(args[1] == "same for all" for args in parts.args)
    order = parts.order(list(range(ranks)))
    assert values_of(join([args[0] for args in parts.args], order)) == values
    assert join([values_of(args[0]) for args in parts.args], order) == values


def test_an_undivided_argument_goes_to_everybody_whole() -> None:
    parts = shares(TO_ALL, Layout(dp=2), (numbers([1, 2]),))
    assert [values_of(args[0]) for args in parts.args] == [[1, 2], [1, 2]]
    assert parts.broadcast
    assert not shares(STRIPED, Layout(dp=2), (numbers([1, 2]),)).broadcast
    assert shares(STRIPED, Layout(dp=2), (1,)).broadcast


def test_divisible_arguments_must_agree_in_rows() -> None:
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        shares(STRIPED, Layout(), (numbers([1]), numbers([1, 2])))


def test_answers_are_joined_by_their_type() -> None:
    assert join([None, None]) is None
    assert join([["a"], [], ["b"]]) == ["a", "b"]
    assert join([Boundary("decode step", 3), Boundary("decode step", 7)]) == Boundary("decode step", 7)


def test_lists_that_are_not_one_to_a_row_are_only_put_in_line() -> None:
    assert join([["a"], ["b", "c"]], [1, 0]) == ["a", "b", "c"]


@dataclass
class Mute:
    pass


def test_answers_that_nobody_can_join_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="Mute need a classmethod `merge`"):
        join([Mute(), Mute()])
