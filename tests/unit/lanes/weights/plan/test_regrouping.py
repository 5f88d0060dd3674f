"""Regrouping of ranks from training to generation: the paper's printed examples, and Table 2 in every layout of up to
64 ranks."""

from fractions import Fraction
from itertools import product

import pytest

from asyncrl.lanes.weights.plan.regrouping import Grouping, Regrouping
from asyncrl.protocols.distribute_collect import THREE_D_ALL_MICRO_DP
from asyncrl.protocols.rank_layout import Layout
from tests.unit.protocols.resharding_cost import costs, formula
from tests.unit.protocols.test_rank_layout import layouts

FIGURE_8 = Layout(1, 4, 2, 1, 2)


def one_based(groups: list[list[int]]) -> list[list[int]]:
    return [[rank + 1 for rank in group] for group in groups]


def test_figure_8_comes_out_as_printed() -> None:
    zero = Regrouping(FIGURE_8)
    vanilla = Regrouping(FIGURE_8, "vanilla")
    assert one_based(zero.replicas()) == [[1, 3], [2, 4], [5, 7], [6, 8]] == one_based(FIGURE_8.generation_replicas())
    assert one_based(zero.gathering()) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert one_based(vanilla.replicas()) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert one_based(vanilla.gathering()) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    unused = [rank + 1 for rank in range(8) if vanilla.cost(rank).redundancy]
    assert unused == [2, 3, 6, 7]


def test_table_2_holds_for_every_layout_of_up_to_64_ranks() -> None:
    checked = 0
    for sizes in layouts():
        layout = Layout(*sizes)
        assert costs(layout, "zero-redundancy") == {formula("zero-redundancy", layout)}, layout
        checked += 1
    assert checked > 2000


def test_vanilla_gathers_the_model_and_leaves_shards_unused() -> None:
    for sizes in layouts(16):
        layout = Layout(*sizes)
        found = costs(Layout(*sizes), "vanilla")
        printed = formula("vanilla", layout)
        assert {(cost.volume, cost.peak) for cost in found} == {(printed.volume, printed.peak)}, layout
        assert max(cost.redundancy for cost in found) in {printed.redundancy, 0}, layout
    assert max(cost.redundancy for cost in costs(FIGURE_8, "vanilla")) == formula("vanilla", FIGURE_8).redundancy


def test_the_three_systems_of_table_2_on_one_machine_and_a_half() -> None:
    layout = Layout(1, 8, 2, 1, 2)
    volumes = [formula(name, layout).volume for name in ("DeepSpeed-Chat", "vanilla", "zero-redundancy")]
    assert volumes == [Fraction(15, 16), Fraction(7, 8), Fraction(3, 8)]
    assert formula("DeepSpeed-Chat", layout).redundancy == Fraction(1, 16)


@pytest.mark.parametrize("grouping", ["zero-redundancy", "vanilla"])
def test_groups_partition_the_ranks_and_places_are_unique(grouping: Grouping) -> None:
    for sizes in layouts(24):
        layout = Layout(*sizes)
        regrouping = Regrouping(layout, grouping)
        micro_dp = layout.pp * layout.tp // (layout.gpp * layout.gtp)
        ranks = list(range(layout.size))
        gathering = micro_dp if grouping == "zero-redundancy" else layout.pp * layout.tp
        for groups, size in ((regrouping.replicas(), layout.gpp * layout.gtp), (regrouping.gathering(), gathering)):
            assert sorted(rank for group in groups for rank in group) == ranks
            assert {len(group) for group in groups} == {size}
        every_place = product(range(layout.gpp), range(layout.gtp), range(micro_dp), range(layout.dp))
        assert sorted(regrouping.place(rank) for rank in ranks) == list(every_place)
        for replica in regrouping.replicas():
            cells = [cell for rank in replica for cell in regrouping.needed(rank)]
            assert sorted(cells) == list(product(range(layout.pp), range(layout.tp)))


def test_prompts_go_to_the_ranks_that_generate_together() -> None:
    for sizes in layouts(16):
        layout = Layout(*sizes)
        rows = THREE_D_ALL_MICRO_DP.distribute([1] * 13, layout)
        replicas = Regrouping(layout).replicas()
        assert replicas == layout.generation_replicas()
        assert all(len({tuple(rows[rank]) for rank in replica}) == 1 for replica in replicas)
        assert sorted(row for first, *_ in replicas for row in rows[first]) == list(range(13))
        assert THREE_D_ALL_MICRO_DP.collect(layout) == [first for first, *_ in replicas]


def test_ranks_that_share_out_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^ranks that share out weights \(shard\) or experts \(ep\) do not regroup"):
        Regrouping(Layout(tp=2, shard=2))
