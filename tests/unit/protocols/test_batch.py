"""Rows taken from columns."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.protocols.batch import Column


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_rows_that_follow_each_other_are_taken_as_any_others_but_without_a_copy(lengths: list[int], data: Any) -> None:
    column = Column.of([np.arange(length, dtype=np.int32) + 10 * row for row, length in enumerate(lengths)])
    start = data.draw(st.integers(0, len(lengths) - 1))
    end = data.draw(st.integers(start, len(lengths)))
    taken = column.take(range(start, end))
    assert [list(values) for values in taken] == [list(column[row]) for row in range(start, end)]
    assert taken.values.dtype == np.int32
    assert not len(taken.values) or np.shares_memory(taken.values, column.values)


def test_a_row_that_is_not_there_cannot_be_taken() -> None:
    with pytest.raises(IndexError):
        Column.of([np.arange(3)]).take([0, 1])
