"""Reports how the samples of a whole run ended, by length of completion. Pure.

Short completions are done first, so whatever ends a run, or prefers finished samples, loses more of the long ones.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from asyncrl.controller.gate.group_state import EndedSample, SampleState, Stage

End = Literal["trained", "dropped", "abandoned"]
ENDS: tuple[End, ...] = ("trained", "dropped", "abandoned")
TENTHS = 10
FINISHED = (Stage.SCORING, Stage.READY)


class LengthReport:
    """Counts how samples ended, for each length: at most as many entries as a completion may have tokens."""

    def __init__(self) -> None:
        self._ends: dict[int, Counter[End]] = {}

    def add(self, ended: Iterable[EndedSample]) -> None:
        """Counts samples that ended. A sample that was dropped before it was sampled has no length yet."""
        for sample in ended:
            if sample.tokens:
                self._ends.setdefault(sample.tokens, Counter())["dropped" if sample.reason else "trained"] += 1

    def report(self, in_flight: Iterable[SampleState]) -> str | None:
        """Returns the text for the end of a run, which abandons these samples; None for fewer than ten samples."""
        left = list(in_flight)
        ends = {tokens: Counter(counts) for tokens, counts in self._ends.items()}
        for sample in left:
            if sample.stage in FINISHED:
                ends.setdefault(sample.tokens, Counter())["abandoned"] += 1
        tenths = by_tenth(ends)
        running = sum(sample.stage is Stage.RUNNING for sample in left)
        return _text(tenths, running) if tenths else None


def by_tenth(ends: dict[int, Counter[End]]) -> list[tuple[int, dict[End, float]]]:
    """Returns for each tenth of the samples, shortest first, its longest length and the share of each end.

    Samples of one length on both sides of a border are divided evenly. Empty for fewer than ten samples.
    """
    total = sum(counts.total() for counts in ends.values())
    if total < TENTHS:
        return []
    size, found = total / TENTHS, list[tuple[int, dict[End, float]]]()
    shares, room = dict.fromkeys(ENDS, 0.0), size
    for tokens, counts in sorted(ends.items()):
        left = float(counts.total())
        while left > 1e-9:
            taken = min(left, room)
            for end in ENDS:
                shares[end] += taken * counts[end] / counts.total() / size
            left, room = left - taken, room - taken
            if room < 1e-9:
                found.append((tokens, shares))
                shares, room = dict.fromkeys(ENDS, 0.0), size
    return found


def _text(tenths: list[tuple[int, dict[End, float]]], running: int) -> str:
    longest = " ".join(str(tokens) for tokens, _ in tenths)
    parts = [f"{end} {' '.join(f'{shares[end]:.0%}' for _, shares in tenths)}" for end in ENDS]
    also = f'; {running} more were still being sampled (finish = "drain" trains what is in flight)' if running else ""
    return f"completions by length, in tenths of up to {longest} tokens: {'; '.join(parts)}{also}"
