"""Predicts the stages of one model on one kind of GPU, always as intervals.

Calibration against a measured run narrows a prediction: `calibrated` scales it so that the likely value is the measured
one, and keeps a spread of 15 %, the error that a local profile leaves elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from asyncrl.simulation.planning import formulas
from asyncrl.simulation.planning.formulas import Degrees
from asyncrl.simulation.planning.gpus import Gpu, Rates
from asyncrl.simulation.planning.model_size import WIDE, ModelSize

# An interval of a predicted number; predictions are never bare points.


@dataclass(frozen=True, slots=True)
class Interval:
    """The least, the likely and the most."""

    low: float
    likely: float
    high: float

    def __post_init__(self) -> None:
        assert self.low <= self.likely <= self.high, f"{self.low}, {self.likely}, {self.high} are in no order"

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Sorts three values of the levels of efficiency; the middle one is likely."""
        low, likely, high = sorted(values)
        return cls(low, likely, high)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __add__(self, other: "Interval") -> "Interval":
        return Interval(self.low + other.low, self.likely + other.likely, self.high + other.high)

    def scaled(self, factor: float) -> "Interval":
        """Multiplies by a factor that is not negative."""
        return Interval(self.low * factor, self.likely * factor, self.high * factor)

    def map(self, function: Callable[[float], float]) -> "Interval":
        """Applies a function that rises or falls."""
        return Interval.of([function(self.low), function(self.likely), function(self.high)])

    def __str__(self) -> str:
        return f"{self.likely:.3g} [{self.low:.3g} - {self.high:.3g}]"


CALIBRATED = 0.15
"""Spread of a prediction that a measurement has calibrated."""
USABLE = 0.9
"""Share of a GPU's memory that services fill: the rest is of drivers, libraries and holes."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Gives seconds of each stage. Arguments are those of the formulas, which name units and sources."""

    size: ModelSize
    gpu: Gpu

    def prefill(self, tokens: float, length: float, degrees: Degrees) -> Interval:
        """Returns seconds in which a replica reads prompts."""
        return self._each(lambda rates: formulas.prefill_seconds(self.size, rates, tokens, length, degrees))

    def decode_step(self, sequences: float, context: float, degrees: Degrees) -> Interval:
        """Returns seconds of one decode step of a replica."""
        return self._each(lambda rates: formulas.decode_step_seconds(self.size, rates, sequences, context, degrees))

    def generation(self, sequences: int, prompt: int, response: int, degrees: Degrees) -> Interval:
        """Returns seconds in which a replica generates answers of one length. Its memory has weights and cache only."""
        room = max(1, self.room(prompt + response, degrees))
        return self._each(
            lambda rates: formulas.generation_seconds(self.size, rates, sequences, prompt, response, degrees, room)
        )

    def scoring(self, samples: int, length: float, degrees: Degrees) -> Interval:
        """Returns seconds of a forward pass over all samples."""
        return self._each(lambda rates: formulas.scoring_seconds(self.size, rates, samples, length, degrees))

    def training(self, samples: int, length: float, degrees: Degrees, updates: int = 1) -> Interval:
        """Returns seconds of the updates of one step."""
        return self._each(lambda rates: formulas.training_seconds(self.size, rates, samples, length, degrees, updates))

    def transition(self, train: Degrees, generate: Degrees, mechanism: str = "hybridflow") -> Interval:
        """Returns seconds of a change of layouts on the same GPUs."""
        return self._each(lambda rates: formulas.transition_seconds(self.size, rates, train, generate, mechanism))

    def transfer(self, senders: int, generate: Degrees) -> Interval:
        """Returns seconds in which new weights reach generators on other GPUs."""
        return self._each(lambda rates: formulas.transfer_seconds(self.size, rates, senders, generate))

    def room(self, context: float, degrees: Degrees, taken: float = 0.0) -> int:
        """Returns how many sequences fit beside the weights. taken: bytes of a GPU that other services hold."""
        free = USABLE * self.gpu.memory - taken - WIDE * self.size.parameters / degrees.replica
        return formulas.room_for(self.size, free, context, degrees)

    def _each(self, formula: Callable[[Rates], float]) -> Interval:
        return Interval.of([formula(rates) for rates in self.gpu.levels])


def calibrated(predicted: Interval, likely_then: float, measured: float) -> Interval:
    """Scales a prediction by what a measurement said about the same stage, and narrows it. likely_then: what was
    predicted for the measured setting."""
    likely = predicted.likely * measured / likely_then
    return Interval(likely / (1 + CALIBRATED), likely, likely * (1 + CALIBRATED))
