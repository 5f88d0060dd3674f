"""Describes how long the stages of an emulated run take, in a form that the processes of its workers get as options."""

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from asyncrl.simulation.fakes.generation import Lengths

Update = Literal["in flight", "drain"]


@dataclass(frozen=True, slots=True)
class LengthSpread:
    """Draws the tokens of completions: lognormal with this mean before they are cut at `cap`; all equal at sigma 0."""

    mean: float
    sigma: float = 0.0
    cap: int = 1 << 20

    def lengths(self) -> Lengths:
        middle = math.log(self.mean) - self.sigma**2 / 2

        def draw(chance: random.Random) -> int:
            return max(1, min(self.cap, round(math.exp(chance.gauss(middle, self.sigma)))))

        return draw


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Says how long an emulated step takes, in seconds.

    lengths: of completions. A token of each of b running samples takes `token + each * b` (weights are read once for
    all, the cache for each). slots: samples that one generator decodes at one time. update: whether generators take new
    weights between two tokens, or once all their running samples have ended. load: seconds in which a generator loads
    them. score, reference: seconds of a sample; reference 0: the service is left out. step, trained_token: a training
    step takes `step + trained_token * tokens`. publish: seconds in which the trainer writes its weights.
    """

    lengths: LengthSpread
    token: float = 0.0
    each: float = 0.0
    slots: int = 64
    update: Update = "in flight"
    load: float = 0.0
    score: float = 0.0
    reference: float = 0.0
    step: float = 0.0
    trained_token: float = 0.0
    publish: float = 0.0

    def token_seconds(self, running: int) -> float:
        """Returns tau(b) = t0 + t1 b."""
        return self.token + self.each * running

    def options(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        values = dict(options)
        return cls(lengths=LengthSpread(**values.pop("lengths")), **values)
