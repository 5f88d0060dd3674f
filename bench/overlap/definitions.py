"""Defines every number that says how much stages overlap; pure functions, and one place for each formula.

`T_wall` is the length of a window after the warm-up, `busy_i` the seconds of it in which stage i computed, `t_i` its
seconds of work a step, `C` the seconds from the admission of a sample until the weights that it trained are in use, and
`eta` the staleness limit. Waiting for weights is no work: it counts as sync.
"""

from collections.abc import Iterable, Mapping, Sequence

Interval = tuple[float, float]
"""Begin and end, in seconds."""


def overlap_efficiency(busy: Iterable[float], wall: float) -> float:
    """Returns E = max_i busy_i / T_wall: 1 where the bottleneck never waits. The step over the slowest stage is 1/E."""
    return max(busy) / wall


def bound(stages: Iterable[float], cycle: float, limit: int) -> float:
    """Returns max(max_i t_i, C / (eta + 1)), the least seconds of a step: at most eta + 1 batches are on their way at
    one time (Little's law)."""
    return max(*stages, cycle / (limit + 1))


def bound_efficiency(stages: Iterable[float], cycle: float, limit: int, step: float) -> float:
    """Returns E_eta = max(max_i t_i, C / (eta + 1)) / T_step, which parts what the runtime costs from what the limit
    does. At most 1: a cycle that was measured over other steps than T_step may give a little more."""
    return min(1.0, bound(stages, cycle, limit) / step)


def bubble_ratio(busy: float, wall: float) -> float:
    """Returns 1 - busy_i / T_wall."""
    return 1.0 - busy / wall


def cluster_bubble(busy: Mapping[str, float], devices: Mapping[str, float], wall: float) -> float:
    """Returns the mean of the bubble ratios of all stages, each weighted by its devices."""
    return sum(devices[name] * bubble_ratio(busy[name], wall) for name in busy) / sum(devices[name] for name in busy)


def overlap_fraction(generation: Iterable[Interval], training: Iterable[Interval]) -> float | None:
    """Returns |busy_gen ∩ busy_train| / min(|busy_gen|, |busy_train|); None when one of them never ran."""
    generated = merged(generation)
    trained = merged(training)
    if not generated or not trained:
        return None
    common = sum(max(0.0, min(one[1], other[1]) - max(one[0], other[0])) for one in generated for other in trained)
    return common / min(length(generated), length(trained))


def contention(overlapped: float, solo: float) -> float:
    """Returns busy_i (overlapped) / busy_i (solo, same work): what the other stages cost this one while it computes."""
    return overlapped / solo


def speedup(synchronous: float, asynchronous: float) -> float:
    """Returns T_sync / T_async: seconds a step on the same devices with the same tokens. The caller names T_sync."""
    return synchronous / asynchronous


def overlap_yield(synchronous: float, asynchronous: float, slowest_solo: float) -> float:
    """Returns (T_sync - T_async) / (T_sync - max_i t_i(solo)): 1 is all that can be gained; nan where nothing can."""
    possible = synchronous - slowest_solo
    return (synchronous - asynchronous) / possible if possible > 0 else float("nan")


def goodput(trained_tokens: float, seconds: float, devices: float) -> float:
    """Returns trained tokens a second and device, over all devices. Tokens that were generated in vain do not count."""
    return trained_tokens / (seconds * devices)


def forward_flops(parameters: float, tokens: float, attention: float = 0.0, context: float = 0.0) -> float:
    """Returns (2 P + 4 A s) per token, for P parameters and mean context s. attention: A, layers times the width of all
    heads."""
    return tokens * (2.0 * parameters + 4.0 * attention * context)


def loop_mfu(generation: float, training: float, wall: float, devices: float, peak: float) -> float:
    """Returns (forward FLOPs of generation + 3 times those of training) / (T_wall x devices x peak). generation,
    training: forward FLOPs of the tokens that were generated, and of those that were trained. peak: FLOPs a second of
    one device."""
    return (generation + 3.0 * training) / (wall * devices * peak)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the time that intervals cover, as intervals that do not touch."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
