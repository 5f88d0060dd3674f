"""An interval of a predicted number; predictions are never bare points."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self


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
