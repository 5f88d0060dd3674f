"""Transfer protocols: how a call fans out over the workers of a service, and how the answers come back.

A protocol is a pair of pure functions over row indices and a layout (HybridFlow, EuroSys 2025, Table 3):
`distribute` says which rows each rank gets, `collect` which ranks' answers are kept, in which order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.protocols.layout import Layout

Rows = Sequence[int]
Distribute = Callable[[Sequence[int], Layout], list[Rows]]
Collect = Callable[[Layout], list[int]]


@dataclass(frozen=True, slots=True)
class Transfer:
    """distribute(row weights, layout) -> rows of each rank; collect(layout) -> ranks whose answers are kept, in order.

    one_of: the whole call goes to a single replica chosen by the runtime (docs/structures.md).
    """

    name: str
    distribute: Distribute
    collect: Collect
    one_of: bool = False


def _everyone(weights: Sequence[int], layout: Layout) -> list[Rows]:
    return [range(len(weights))] * layout.size


def _all_ranks(layout: Layout) -> list[int]:
    return list(range(layout.size))


ONE_TO_ALL = Transfer("ONE_TO_ALL", _everyone, _all_ranks)
ONE_OF = Transfer("ONE_OF", _everyone, _all_ranks, one_of=True)
DP_PROTO = Transfer("DP_PROTO", _everyone, _all_ranks)
THREE_D_PROTO = Transfer("THREE_D_PROTO", _everyone, _all_ranks)
