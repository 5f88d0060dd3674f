"""The rule of staleness: which tokens may enter the loss, which samples expire, and how much may be in flight.

Gate, trainer, report, feedback and simulation ask a policy what follows from it; its name stands here alone.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

Policy = Literal["mask", "drop", "block", "admit"]
POLICY_MEANING = (
    "Treatment of older tokens: they leave the loss (mask), their samples are dropped (drop), the fleet waits so that "
    "there are none (block), or they train (admit)."
)


def live(stamps: Any, version: int, limit: float) -> Any:
    """Returns whether a token sampled at version `stamps` (a number, or an array or tensor of them) may enter the
    loss."""
    return version - stamps <= limit


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """Says what becomes of tokens older than the limit, and so of their samples and groups.

    bounded: no token over the limit enters the loss. by_token: old tokens leave the loss one by one, so a sample may
    run past the limit, where it holds no credit, and a part of a group may train. stamp: the token whose age drops a
    sample; "": none does. by_draw: deadlines count from the draw of a group, and a batch is picked to meet them all.
    """

    bounded: bool = True
    by_token: bool = False
    stamp: Literal["first", "last", ""] = ""
    by_draw: bool = False

    def live(self, stamps: Any, version: int, limit: int) -> Any:
        """Returns as `live` whether tokens may enter the loss; without a bound all may."""
        return live(stamps, version, limit if self.bounded else math.inf)

    def expires(self, first: int, last: int) -> int | None:
        """Returns the version of a sample, sampled from `first` to `last`, whose age drops it; None: no age does."""
        return last if self.stamp == "last" else first if self.stamp == "first" else None

    def capacity(self, limit: int, groups: int, decoding: int) -> int:
        """Returns how many groups may be in flight. groups: of a batch. decoding: groups that are decoded at one time;
        where stragglers hold a slot and no credit, so many are added."""
        return (limit + 1) * groups + (decoding if self.by_token else 0)


POLICIES: dict[Policy, StalenessPolicy] = {
    "mask": StalenessPolicy(by_token=True, stamp="last"),
    "drop": StalenessPolicy(stamp="first"),
    "block": StalenessPolicy(by_draw=True),
    "admit": StalenessPolicy(bounded=False),
}
