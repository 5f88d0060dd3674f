"""Compares the results of `asyncrl-bench channels` with goals: each is a ratio of two values of the same round."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from asyncrl.bench.measurements import RoundValues, goal_line

Results = Mapping[str, float]
Round = Mapping[str, Results]
"""The results of each system in one round; systems that do not run are missing."""

Metric = tuple[str, str]
"""A system and one of its results."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Bounds the ratio above / below. at_most: the bound is an upper bound, else a lower bound. below is None where
    the value itself is bounded."""

    name: str
    label: str
    bound: float
    above: Metric
    below: Metric | None
    at_most: bool = False

    def ratios(self, rounds: Sequence[Round]) -> list[float]:
        """Returns the ratio of every round that has both values."""
        found = []
        for each in rounds:
            with suppress(KeyError):
                below = each[self.below[0]][self.below[1]] if self.below else 1.0
                found.append(each[self.above[0]][self.above[1]] / below)
        return found


def _slower(metric: str, than: str, theirs: str = "") -> tuple[Metric, Metric]:
    """Divides the time of the other system by ours."""
    return (than, theirs or metric), ("asyncrl", metric)


def _more(metric: str, than: str, theirs: str = "") -> tuple[Metric, Metric]:
    """Divides our value by that of the other system."""
    return ("asyncrl", metric), (than, theirs or metric)


def _frames_over_rows(way: str) -> tuple[Metric, Metric]:
    return _slower(f"{way}_ms", "asyncrl", f"frames_{way}_ms")


GOALS = (
    Goal("G1", "64 B round trip over an asyncio echo", 3.0, *_more("rtt_p50_us", "limits"), at_most=True),
    Goal("G1", "64 B round trip, Ray over ours", 5.0, *_slower("rtt_p50_us", "ray")),
    Goal("G2", "1 MB batch one at a time, Ray over ours", 10.0, *_slower("batch_ms", "ray")),
    Goal("G2", "1 MB batch one at a time, xoscar over ours", 5.0, *_slower("batch_ms", "xoscar")),
    Goal("G2", "1 MB batches pipelined over cold memcpy", 0.5, *_more("piped_gb_s", "limits", "memcpy_gb_s")),
    Goal("G3", "64 MB over cold memcpy", 0.8, *_more("large_gb_s", "limits", "memcpy_gb_s")),
    Goal("G3", "64 MB, ours over Ray", 2.0, *_more("large_gb_s", "ray")),
    Goal("G3", "64 MB, ours over xoscar", 20.0, *_more("large_gb_s", "xoscar")),
    Goal("G4", "64 MB frames over zmq.asyncio", 2.0, *_more("frames_large_gb_s", "limits", "zmq_gb_s")),
    Goal("G4", "64 MB frames over a Unix socket", 0.45, *_more("frames_large_gb_s", "limits", "unix_gb_s")),
    Goal("G5", "gather 64 MB, frames over rows in place", 3.0, *_frames_over_rows("gather_large")),
    Goal("G5", "gather 1 MB, frames over rows in place", 3.0, *_frames_over_rows("gather_small")),
    Goal("G5", "scatter 64 MB, frames over rows", 1.3, *_frames_over_rows("scatter_large")),
    Goal("G5", "scatter 1 MB, frames over rows", 1.3, *_frames_over_rows("scatter_small")),
    Goal("G7", "loop stall in a flood of 60,000, ms", 10.0, ("asyncrl", "stall_ours_ms"), None, at_most=True),
    Goal("G7", "CPU of a message, zmq.asyncio over ours", 5.0, *_slower("flood_ours_us", "limits", "flood_zmq_us")),
)


def result_lines(rounds: Sequence[Round]) -> Iterator[str]:
    """Yields the median and the range of each metric, system by system."""
    for system in dict.fromkeys(name for each in rounds for name in each):
        yield f"{system}:"
        results = [each[system] for each in rounds if system in each]
        for metric in results[0]:
            yield f"  {metric:26} {RoundValues(tuple(each[metric] for each in results if metric in each))}"


def goal_lines(rounds: Sequence[Round]) -> Iterator[str]:
    """Yields each goal beside the measured ratio."""
    for goal in GOALS:
        label = f"{goal.name}  {goal.label:40}"
        if ratios := goal.ratios(rounds):
            measured = RoundValues(tuple(ratios))
            yield goal_line(f"{label} {measured}", measured.median, goal.bound, at_most=goal.at_most)
        else:
            yield f"          {label} not measured"
