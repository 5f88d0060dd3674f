"""Regrouping of ranks from training to generation: the paper's printed example, and Table 2 in every layout of up to
64 ranks."""

from fractions import Fraction
from itertools import product

import pytest

from asyncrl.lanes.weights.plan.regrouping import Regrouping
from asyncrl.protocols.distribute_collect import THREE_D_ALL_MICRO_DP
from asyncrl.protocols.rank_layout import Layout
from tests.unit.protocols.resharding_cost import Transition, formula
from tests.unit.protocols.test_rank_layout import layouts


def test_figure_8_comes_out_as_printed() -> None:
    layout = Layout(1, 4, 2, 1, 2)
    replicas, gathering = (
        [[rank + 1 for rank in group] for group in groups]
        for groups in (layout.generation_replicas(), layout.groups("gathering"))
    )
    assert replicas == [[1, 3], [2, 4], [5, 7], [6, 8]]
    assert gathering == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_table_2_holds_for_every_layout_of_up_to_64_ranks() -> None:
    """A rank needs what its gathering group trains, its own cell among it: nothing is received or held in vain."""
    checked = 0
    for sizes in layouts():
        layout = Layout(*sizes)
        regrouping = Regrouping(layout)
        cell = Fraction(1, layout.pp * layout.tp)
        for group in layout.groups("gathering"):
            gathered = {layout.place(rank)[:2] for rank in group}
            assert all(regrouping.needed(rank) == gathered for rank in group), layout
            cost = Transition((len(gathered) - 1) * cell, len(gathered) * cell, Fraction(0))
            assert cost == formula("zero-redundancy", layout), layout
        checked += 1
    assert checked > 2000


def test_prompts_go_to_the_ranks_that_generate_together_which_hold_the_model_between_them() -> None:
    for sizes in layouts(16):
        layout = Layout(*sizes)
        rows = THREE_D_ALL_MICRO_DP.distribute([1] * 13, layout)
        replicas = layout.generation_replicas()
        assert all(len({tuple(rows[rank]) for rank in replica}) == 1 for replica in replicas)
        assert sorted(row for first, *_ in replicas for row in rows[first]) == list(range(13))
        assert THREE_D_ALL_MICRO_DP.collect(layout) == [first for first, *_ in replicas]
        for replica in replicas:
            cells = [cell for rank in replica for cell in Regrouping(layout).needed(rank)]
            assert sorted(cells) == list(product(range(layout.pp), range(layout.tp)))


def test_ranks_that_share_out_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^ranks that share out weights \(shard\) or experts \(ep\) do not regroup"):
        Regrouping(Layout(tp=2, shard=2))
