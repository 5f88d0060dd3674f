import numpy as np
import pytest

from asyncrl.lanes.weights.plan.placements import CheckpointTensor, Mesh, Shard, flat_shards
from tests.unit.lanes.weights.plan.local_views import LocalView, RankMemory

TENSORS = [CheckpointTensor("q", (8, 6)), CheckpointTensor("k", (4, 6)), CheckpointTensor("odd", (4, 5))]
ROWS = dict.fromkeys(("q", "k", "odd"), Mesh.of(np.arange(2), Shard(0)))


def test_fused_tensors_stand_below_each_other() -> None:
    memory = RankMemory.of(1, TENSORS, ROWS, {"qk": ("q", "k")})
    assert memory.shapes == {"qk": (6, 6), "odd": (2, 5)}
    assert memory.view("k", ((2, 3), (1, 4))) == LocalView("qk", 4 * 6 + 1, (1, 3), (6, 1))


def test_several_boxes_stand_behind_each_other_in_a_flat_parameter() -> None:
    flat = flat_shards((4, 5), [[0, 1, 2]])  # Rank 1 has elements 7 to 14: the end of row 1, row 2 is whole up to 14.
    memory = RankMemory.of(1, TENSORS[2:], {"odd": flat})
    assert memory.shapes == {"odd": (7,)}
    assert memory.view("odd", ((1, 2), (3, 5))) == LocalView("odd", 1, (1, 2), (3, 1))
    assert memory.view("odd", ((2, 3), (0, 2))) == LocalView("odd", 3, (1, 2), (4, 1))


def test_a_box_that_a_rank_does_not_hold_is_an_error() -> None:
    with pytest.raises(KeyError, match="does not hold"):
        RankMemory.of(0, TENSORS, ROWS).view("q", ((3, 5), (0, 6)))


def test_tensors_of_another_width_are_not_fused() -> None:
    with pytest.raises(ValueError, match="x fuses q, odd, which need one box each, of the same width"):
        RankMemory.of(0, TENSORS, ROWS, {"x": ("q", "odd")})
