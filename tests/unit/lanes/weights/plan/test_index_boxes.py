from itertools import combinations
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.lanes.weights.plan.placements import as_bounds, box_volume, difference, flat_boxes, intersection, overlap
from tests.unit.lanes.weights.plan.transfer_simulation import sliced

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_flat_range_is_few_boxes_in_memory_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    boxes = flat_boxes(shape, start, stop)
    assert len(boxes) <= 2 * len(shape) - 1
    whole = np.arange(prod(shape)).reshape(shape)
    assert [int(value) for box in boxes for value in sliced(whole, box).ravel()] == list(range(start, stop))


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=2, max_size=2), min_size=1, max_size=6)
)
def test_overlap_and_difference_agree_with_pairs_of_boxes(drawn: list[list[tuple[int, int]]]) -> None:
    boxes = [tuple((start, start + size) for start, size in box) for box in drawn]
    pairs = list(combinations(boxes, 2))
    assert overlap(as_bounds(boxes, 2)) == any(intersection(a, b) is not None for a, b in pairs)
    for one, other in pairs:
        shared = intersection(one, other)
        rest = difference(one, other)
        assert sum(map(box_volume, rest)) == box_volume(one) - (box_volume(shared) if shared else 0)
        assert all(intersection(part, other) is None for part in rest)
        assert not overlap(as_bounds(rest, 2))


def test_boxes_overlap_past_others_that_begin_between_them() -> None:
    apart = [((start, start + 1), (5, 6)) for start in range(1, 4)]
    assert not overlap(as_bounds([((0, 10), (0, 1)), *apart], 2))
    assert overlap(as_bounds([((0, 10), (0, 1)), *apart, ((4, 5), (0, 1))], 2))


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 0)])
def test_a_scalar_is_one_box_without_dimensions(start: int, stop: int) -> None:
    assert flat_boxes((), start, stop) == [()] * (stop - start)
    assert box_volume(()) == 1
