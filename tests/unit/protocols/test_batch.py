"""Rows taken from columns."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.protocols.batch import BatchRef, Column, Place, RowRef


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


@pytest.mark.parametrize("offsets", [[1, 3], [0, 2], [0, 4], [0, 2, 1, 3], []])
def test_offsets_that_do_not_rise_to_the_number_of_values_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offset"):
        Column(np.arange(3), np.array(offsets, np.int64))


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4))
def test_a_column_returns_the_rows_that_it_is_made_of(rows: list[list[int]]) -> None:
    column = Column.of([np.array(row, np.int64) for row in rows])
    assert [row.tolist() for row in column] == rows
    assert column.offsets.dtype == np.int64
    assert Column.join([column, column]).offsets.tolist() == Column.of([*column, *column]).offsets.tolist()


def test_samples_of_which_two_services_made_columns_lie_at_all_their_places() -> None:
    made, one, other = (Place(f"inproc://{name}", 0, 1, (name,)) for name in ("a", "b", "c"))
    row = RowRef(3, 0, 0, 1, 2, 5, 0, 0, "stop", (made,))
    samples = BatchRef((row,))
    joined = samples.with_places([one]).also_at(samples.with_places([other]))
    assert joined.rows[0] == row._replace(places=(made, one, other))
    with pytest.raises(ValueError, match="shorter"):
        joined.also_at(BatchRef(()))
