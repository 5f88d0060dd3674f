"""The cost of going from training to generation on the same ranks as HybridFlow (EuroSys 2025) prints it in Table 2:
per rank, as fractions of the bytes of the whole model."""

from fractions import Fraction
from typing import Literal

from asyncrl.lanes.weights.plan.regrouping import Grouping, Regrouping, Transition
from asyncrl.protocols.rank_layout import Layout

System = Literal["DeepSpeed-Chat"] | Grouping


def formula(system: System, layout: Layout) -> Transition:
    """Returns Table 2. The redundancy of `vanilla` is that of its worst ranks, whose two shards do not overlap."""
    model = layout.pp * layout.tp
    ranks = layout.size
    whole = Fraction(1)
    shard = Fraction(1, model)
    if system == "DeepSpeed-Chat":
        return Transition(Fraction(ranks - 1, ranks), whole, Fraction(1, ranks))
    if system == "vanilla":
        return Transition(whole - shard, whole, shard)
    generation = layout.gpp * layout.gtp
    return Transition(Fraction(model - generation, generation * model), Fraction(1, generation), Fraction(0))


def costs(layout: Layout, grouping: Grouping) -> set[Transition]:
    """Returns what the change costs, of every rank."""
    regrouping = Regrouping(layout, grouping)
    return {regrouping.cost(rank) for rank in range(layout.size)}
