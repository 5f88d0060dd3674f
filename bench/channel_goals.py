"""The goals of `asyncrl-bench channels`, each a ratio of two things measured in the same round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Results = Mapping[str, float]
Round = Mapping[str, Results]
"""System -> what it measured in this round; a system that is not there is missing."""

Ratio = Callable[[Round], float]


@dataclass(frozen=True, slots=True)
class Goal:
    """least: the ratio must be at least the bound, else at most."""

    name: str
    what: str
    bound: float
    ratio: Ratio
    least: bool = True

    def reached(self, ratio: float) -> bool:
        return ratio >= self.bound if self.least else ratio <= self.bound


def _over(system: str, of: str, than: str, theirs: str) -> Ratio:
    return lambda found: found[system][of] / found[than][theirs]


def _faster(metric: str, than: str, theirs: str = "") -> Ratio:
    """How many times longer they take."""
    return _over(than, theirs or metric, "asyncrl", metric)


def _quicker(metric: str, than: str, theirs: str = "") -> Ratio:
    """How many times more we do."""
    return _over("asyncrl", metric, than, theirs or metric)


GOALS = (
    Goal("G1", "64 B round trip over a bare asyncio echo", 3.0, _quicker("rtt_p50_us", "limits"), least=False),
    Goal("G1", "64 B round trip, Ray over ours", 5.0, _faster("rtt_p50_us", "ray")),
    Goal("G2", "1 MB batch one at a time, Ray over ours", 10.0, _faster("batch_ms", "ray")),
    Goal("G2", "1 MB batch one at a time, xoscar over ours", 5.0, _faster("batch_ms", "xoscar")),
    Goal("G2", "1 MB batches pipelined over cold memcpy", 0.5, _quicker("piped_gb_s", "limits", "memcpy_gb_s")),
    Goal("G3", "64 MB over cold memcpy", 0.8, _quicker("large_gb_s", "limits", "memcpy_gb_s")),
    Goal("G3", "64 MB, ours over Ray", 2.0, _quicker("large_gb_s", "ray")),
    Goal("G3", "64 MB, ours over xoscar", 20.0, _quicker("large_gb_s", "xoscar")),
    Goal("G4", "64 MB frames over zmq.asyncio", 2.0, _quicker("frames_large_gb_s", "limits", "zmq_gb_s")),
    Goal("G4", "64 MB frames over a Unix socket", 0.45, _quicker("frames_large_gb_s", "limits", "unix_gb_s")),
    Goal(
        "G5",
        "gather 64 MB, frames over rows in place",
        3.0,
        _faster("gather_large_ms", "asyncrl", "frames_gather_large_ms"),
    ),
    Goal(
        "G5",
        "gather 1 MB, frames over rows in place",
        3.0,
        _faster("gather_small_ms", "asyncrl", "frames_gather_small_ms"),
    ),
    Goal(
        "G5", "scatter 64 MB, frames over rows", 1.3, _faster("scatter_large_ms", "asyncrl", "frames_scatter_large_ms")
    ),
    Goal(
        "G5", "scatter 1 MB, frames over rows", 1.3, _faster("scatter_small_ms", "asyncrl", "frames_scatter_small_ms")
    ),
    Goal(
        "G7", "loop stall in a flood of 60,000, ms", 10.0, lambda found: found["asyncrl"]["stall_ours_ms"], least=False
    ),
    Goal(
        "G7",
        "CPU of a queued message, zmq.asyncio over ours",
        5.0,
        _over("limits", "flood_zmq_us", "asyncrl", "flood_ours_us"),
    ),
)


def seen(goal: Goal, found: Sequence[Round]) -> list[float]:
    """The ratio of every round that has both sides."""
    ratios = []
    for each in found:
        try:
            ratios.append(goal.ratio(each))
        except KeyError:
            continue
    return ratios


def table(found: Sequence[Round]) -> Iterator[str]:
    """System by system, each metric: median and range over the rounds."""
    for system in dict.fromkeys(name for each in found for name in each):
        yield f"{system}:"
        rounds = [each[system] for each in found if system in each]
        for metric in rounds[0]:
            values = [each[metric] for each in rounds if metric in each]
            yield f"  {metric:26} {median(values):10.4g}   [{min(values):.4g} - {max(values):.4g}]"


def verdicts(found: Sequence[Round]) -> Iterator[str]:
    """Every goal beside what was seen."""
    for goal in GOALS:
        sign = "at least" if goal.least else "at most"
        asked = f"{goal.name}  {goal.what:48} {sign:8} {goal.bound:5.4g}"
        if not (ratios := seen(goal, found)):
            yield f"{asked}   not measured"
            continue
        middle = median(ratios)
        word = "reached" if goal.reached(middle) else "MISSED"
        yield f"{asked}   seen {middle:7.3g}  [{min(ratios):.3g} - {max(ratios):.3g}]  {word}"
