from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.lanes.weights.plan.placements import Boxes, CheckpointTensor, Mesh, Replicate, Shard, as_box, flat_shards


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 4))
def test_shards_are_those_of_torch_chunk_and_the_outer_axis_cuts_first(rows: int, outer: int, inner: int) -> None:
    held = Mesh.of(np.arange(outer * inner).reshape(outer, inner), Shard(0), Shard(0)).held((rows,))
    found = {rank: as_box(bounds)[0] for bounds, rank in zip(held.bounds, held.ranks.tolist(), strict=True)}
    for place, part in enumerate(torch.arange(rows).chunk(outer)):
        for index, expected in enumerate(part.chunk(inner)):
            start, stop = found.pop(place * inner + index)
            assert list(range(start, stop)) == expected.tolist()
    assert not found


def test_a_mesh_of_some_ranks_makes_them_the_owners() -> None:
    held = Mesh.of(np.array([[5, 3], [9, 7]]), Replicate(), Shard(1)).held((2, 6))
    assert held.ranks.tolist() == [5, 3, 9, 7]
    assert [as_box(bounds)[1] for bounds in held.bounds] == [(0, 3), (3, 6)] * 2


def test_flat_shards_are_equal_but_for_the_last_ones() -> None:
    boxes = flat_shards((3, 5), [[0, 1, 2, 3]]).held((3, 5))
    sizes = [int(sum(np.prod(b[:, 1] - b[:, 0]) for b in boxes.bounds[boxes.ranks == rank])) for rank in range(4)]
    assert sizes == [4, 4, 4, 3]
    assert all(first <= second for first, second in pairwise(boxes.ranks.tolist()))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Mesh((0, 1), (3,), (Shard(0),)), "has 2 ranks"),
        (lambda: Mesh((0, 1), (2,), ()), "0 cuts"),
        (lambda: Mesh((0, 0), (2,), (Shard(0),)), "stands once"),
        (lambda: Mesh((-1,), (1,), (Shard(0),)), "at least 0"),
        (lambda: Mesh((0,), (1,), (Shard(1),)).held((4,)), "needs a tensor of 2 dimensions, not of 1"),
        (lambda: Boxes.of({0: [((0, 5),)]}).held((4,)), "not inside"),
        (lambda: Boxes.of({0: [((1, 1),)]}).held((4,)), "not inside"),
        (lambda: Boxes.of({0: [((0, 1),)]}).held((4, 4)), "not inside"),
        (lambda: Boxes.of({0: [((0, 3),), ((2, 4),)]}).held((4,)), "boxes of rank 0 share elements"),
        (lambda: CheckpointTensor("w", (1,), "int3"), "w has dtype 'int3'"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
