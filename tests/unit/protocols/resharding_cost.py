"""The cost of going from training to generation on the same ranks as HybridFlow (EuroSys 2025) prints it in Table 2:
per rank, as fractions of the bytes of the whole model."""

from fractions import Fraction
from typing import Literal, NamedTuple

from asyncrl.protocols.rank_layout import Layout


class Transition(NamedTuple):
    """volume: received; peak: held at one time for generation; redundancy: of its training shard, what generation has
    no use for and memory holds beside it."""

    volume: Fraction
    peak: Fraction
    redundancy: Fraction


def formula(system: Literal["DeepSpeed-Chat", "vanilla", "zero-redundancy"], layout: Layout) -> Transition:
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
