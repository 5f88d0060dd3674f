"""Rank arithmetic of training layouts; tests/unit/lanes/weights/plan/test_regrouping.py has their regrouping."""

from collections.abc import Iterator
from itertools import product

import pytest

from asyncrl.protocols.distribute_collect import THREE_D_PROTO
from asyncrl.protocols.rank_layout import Layout, Place3D


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def layouts(ranks: int = 64) -> Iterator[tuple[int, int, int, int, int]]:
    """Every (p, t, d, p_g, t_g) of at most this many ranks."""
    for pp in range(1, ranks + 1):
        for tp in range(1, ranks // pp + 1):
            for dp in range(1, ranks // (pp * tp) + 1):
                for gpp in divisors(pp):
                    yield from ((pp, tp, dp, gpp, gtp) for gtp in divisors(tp))


def test_ranks_of_a_training_layout() -> None:
    layout = Layout(pp=2, tp=3, dp=2)
    assert layout.place(10) == Place3D(pp=1, tp=1, dp=1)
    assert layout.rank(pp=-1, dp=-1) == 9
    assert layout.size == 12


@pytest.mark.parametrize("sizes", [(0, 1, 1), (2, 4, 1, 3, 1), (2, 4, 1, 1, 3), (1, 1, 1, 0, 1)])
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must divide|at least 1"):
        Layout(*sizes)


def test_groups_along_the_axes_of_four_ranks() -> None:
    layout = Layout(tp=2, shard=2)
    assert layout.groups("everyone") == [[0, 1, 2, 3]]
    assert layout.groups("rows") == layout.groups("shards") == [[0, 2], [1, 3]]
    assert layout.groups("copies") == [[0], [1], [2], [3]]
    assert layout.groups("tensor") == [[0, 1], [2, 3]]
    assert layout.groups("stages") == layout.groups("ends") == [[0], [1], [2], [3]]
    assert Layout(pp=3, dp=2).groups("stages") == [[0, 1, 2], [3, 4, 5]]
    assert Layout(pp=3, dp=2).groups("ends") == [[0, 2], [1], [3, 5], [4]]
    assert Layout(dp=2, shard=2).groups("shards") == [[0, 1], [2, 3]]
    assert Layout(dp=2, shard=2).groups("copies") == [[0, 2], [1, 3]]


def test_ranks_with_slices_of_the_same_rows_are_copies_side_by_side() -> None:
    layout = Layout(sp=2, dp=2)
    assert layout.groups("sequence") == [[0, 1], [2, 3]]
    assert layout.groups("rows") == [[0, 2], [1, 3]]
    assert layout.groups("copies") == [[0, 1, 2, 3]]
    assert layout.groups("tensor") == layout.groups("stages") == layout.groups("gathering") == [[0], [1], [2], [3]]
    assert [layout.place(rank).dp for rank in range(4)] == [0, 0, 1, 1]
    assert THREE_D_PROTO.collect(layout) == [0, 2]


def test_ranks_that_share_out_experts_have_rows_of_their_own() -> None:
    layout = Layout(dp=2, ep=2)
    assert layout.groups("rows") == layout.groups("copies") == [[0, 1, 2, 3]]
    assert layout.groups("experts") == [[0, 1], [2, 3]]
    assert layout.groups("expert_copies") == [[0, 2], [1, 3]]
    assert layout.groups("shards") == layout.groups("tensor") == layout.groups("sequence") == [[0], [1], [2], [3]]
    assert [layout.place(rank).dp for rank in range(4)] == THREE_D_PROTO.collect(layout) == [0, 1, 2, 3]
    assert Layout(shard=2, ep=2).groups("shards") == [[0, 2], [1, 3]]
    assert Layout(shard=2, ep=2).groups("copies") == [[0, 1], [2, 3]]


@pytest.mark.parametrize("sizes", list(product((1, 2), (1, 3), (1, 2), (1, 2))))
def test_each_sum_over_rows_counts_every_row_once(sizes: tuple[int, int, int, int]) -> None:
    """Ranks of one group have all rows between them and no row twice; copies times shards are those ranks."""
    pp, tp, dp, shard = sizes
    layout = Layout(pp, tp, dp, shard=shard)
    count = 13
    rows = THREE_D_PROTO.distribute([1] * count, layout)
    for group in layout.groups("rows"):
        assert sorted(row for rank in group for row in rows[rank]) == list(range(count))
        assert len({(layout.place(rank).pp, layout.place(rank).tp) for rank in group}) == 1
    for axis, size in (
        ("rows", dp * shard),
        ("copies", dp),
        ("shards", shard),
        ("tensor", tp),
        ("stages", pp),
        ("everyone", layout.size),
    ):
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.size))
        assert {len(group) for group in groups} == {size}
    for copies, shards in product(layout.groups("copies"), layout.groups("shards")):
        assert len(set(copies) & set(shards)) <= 1
    assert THREE_D_PROTO.collect(layout) == [layout.rank(pp=-1, dp=index) for index in range(dp * shard)]


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"tp": 2}, {"pp": 2}, {"ep": 2}, {"sp": 2}, {"pp": 2, "tp": 2}])
def test_ranks_of_the_same_part_are_copies_and_one_of_each_makes_up_the_model(sizes: dict[str, int]) -> None:
    layout = Layout(dp=3, **sizes)
    held: dict[int, list[int]] = {}
    for rank in range(layout.size):
        held.setdefault(layout.part(rank), []).append(rank)
    assert sorted(held) == list(range(layout.parts))
    axis = "expert_copies" if layout.ep > 1 else "copies"
    assert sorted(held.values()) == sorted(layout.groups(axis))
