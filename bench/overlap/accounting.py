"""Defines every number that says how much stages overlap, and computes them from what a run recorded.

busy_i is the share of the time in which workers of service i computed, weighted over steps by their length. The first
tenth of the steps is left out as warm-up. Evaluation is no stage of a step, and is listed only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from asyncrl.deploy.report.run_record import RunRecord, lengths_of, mean_shares, services_of
from asyncrl.deploy.report.worker_trace import NEW_WEIGHTS, STEP, Arrow, Slice, WorkerTrace
from asyncrl.engines.models.model_shape import Shape, shape_of
from asyncrl.errors import ConfigError
from asyncrl.simulation.planning.gpus import known_gpus
from asyncrl.telemetry.jsonl import Object
from asyncrl.telemetry.run_directory import RunDirectory

# ---- the formulas, one place for each ----
#
# `T_wall` is the length of a window after the warm-up, `busy_i` the seconds of it in which stage i computed, `t_i`
# its seconds of work a step, `C` the seconds from the admission of a sample until the weights that it trained are in
# use, and `eta` the staleness limit. Waiting for weights is no work: it counts as sync.


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


LEAST_STEPS = 5
"""Steps after the warm-up below which shares are not reported."""
ROUNDING = 1e-3
"""By how much the shares of a worker may differ from 1 in sum."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """The accounting of one run.

    name: of the run. shares: of each service, by state. step: mean seconds of a step. steps: how many were counted.
    tokens: trained a second. devices: of the run. limit: of staleness. cycle: C in seconds, and `both_ran` the overlap
    fraction; None without a trace. traced: seconds of the trace, at the end of the run.
    """

    name: str
    shares: dict[str, dict[str, float]]
    step: float
    steps: int
    tokens: float
    devices: int
    limit: int
    cycle: float | None
    both_ran: float | None
    traced: float

    @property
    def stages(self) -> dict[str, float]:
        """Returns the share of the time in which each stage of a step was busy."""
        return {service: each["busy"] for service, each in self.shares.items() if service != "evaluation"}

    @property
    def slowest(self) -> str:
        """Returns the stage that is busy for the largest share."""
        return max(self.stages, key=self.stages.__getitem__)

    @property
    def efficiency(self) -> float:
        return overlap_efficiency(self.stages.values(), 1.0)

    @property
    def bound_efficiency(self) -> float | None:
        if self.cycle is None:
            return None
        seconds = [share * self.step for share in self.stages.values()]
        return bound_efficiency(seconds, self.cycle, self.limit, self.step)

    @property
    def bubble(self) -> float:
        """Returns the mean bubble ratio of the stages, which count as one device each."""
        return cluster_bubble(self.stages, dict.fromkeys(self.stages, 1.0), 1.0)

    @property
    def goodput(self) -> float:
        """Returns trained tokens a second and device."""
        return goodput(self.tokens, 1.0, self.devices)


def overlap_of(run: RunRecord, trace: WorkerTrace) -> Overlap:
    """Computes the accounting. Raises ConfigError for a run with too few steps, or with shares that do not add up."""
    first = max(1, len(run.steps) // 10)
    steps = run.steps[first:]
    lengths = lengths_of(run.seconds)[first:]
    if len(steps) < LEAST_STEPS:
        raise ConfigError(
            f"{run.path} trained {len(run.steps)} steps; shares say something from {LEAST_STEPS + 1} steps on"
        )
    total = sum(lengths)
    slices = trace.slices
    return Overlap(
        name=run.name,
        shares={service: shares_of(steps, lengths, service, run.name) for service in services_of(steps)},
        step=total / len(steps),
        steps=len(steps),
        tokens=sum(step.get("tokens/trained") or 0.0 for step in steps) / total,
        devices=run.devices,
        limit=run.config.staleness.limit,
        cycle=cycle_seconds(trace.arrows),
        both_ran=overlap_fraction(*busy_intervals(slices)),
        traced=slices[-1].end - slices[0].begin if slices else 0.0,
    )


def shares_of(steps: Sequence[Object], lengths: Sequence[float], service: str, run: str) -> dict[str, float]:
    """Returns the shares of the states of a service. Raises ConfigError when they do not add up to 1."""
    shares = mean_shares(steps, lengths, service)
    if abs(sum(shares.values()) - 1.0) > ROUNDING:
        raise ConfigError(
            f"{run}: the states of {service} add up to {sum(shares.values()):.4f} of the time, not 1: its metrics were "
            "written by another version of asyncrl"
        )
    return shares


def cycle_seconds(arrows: Sequence[Arrow]) -> float | None:
    """Returns the mean time from the begin of a group's generation until the weights of its step are in use; None where
    the trace holds no whole cycle."""
    in_use: dict[Slice, float] = {}
    for arrow in arrows:
        if arrow.what == "weights":
            in_use[arrow.begin] = min(arrow.end.end, in_use.get(arrow.begin, arrow.end.end))
    cycles = [
        in_use[arrow.end] - arrow.begin.begin
        for arrow in arrows
        if arrow.what == "samples" and arrow.end.name == STEP and arrow.end in in_use
    ]
    return fmean(cycles) if cycles else None


def busy_intervals(slices: Sequence[Slice]) -> tuple[list[Interval], list[Interval]]:
    """Returns when generators sampled and when the trainer trained, by their spans, from the first tenth of the steps
    that the trace holds to the last of them."""
    generated = [each for each in slices if each.worker.startswith("generation") and each.name != NEW_WEIGHTS]
    trained = [each for each in slices if each.worker.startswith("training") and each.name == STEP]
    if not trained:
        return [], []
    begin = trained[len(trained) // 10].begin
    end = max(each.end for each in trained)
    return _within(generated, begin, end), _within(trained, begin, end)


def _within(slices: Iterable[Slice], begin: float, end: float) -> list[Interval]:
    cut = ((max(each.begin, begin), min(each.end, end)) for each in slices)
    return [each for each in cut if each[0] < each[1]]


# Computes loop MFU: the share of what the devices of a run could compute that its tokens needed.
#
# Counted are completion tokens: a forward of each that was sampled, and three times that of each that was trained
# (forward and backward); prompts, embeddings that are looked up and passes for log-probs are left out. So the number
# is a lower bound, and comparable between runs of one workload.


def peak_flops(text: str) -> float:
    """Returns the FLOPs a second of one device: of a known GPU, or as a number. Raises ConfigError."""
    if text in known_gpus():
        return known_gpus()[text].peak
    try:
        peak = float(text)
    except ValueError:
        peak = 0.0
    if not 0 < peak < float("inf"):
        raise ConfigError(f"--peak: {text!r} is no number above 0, and none of {', '.join(known_gpus())}")
    return peak


def mfu_of(run: RunRecord, peak: float) -> float:
    """Returns the loop MFU of a run after the first tenth of its steps. Raises ConfigError for a model whose shape is
    unknown."""
    shape = shape_of(str(RunDirectory(run.path).model)) or shape_of(run.config.model.name)
    if shape is None:
        raise ConfigError(f"{run.path}: its model {run.config.model.name} has a shape that is not known")
    first = max(1, len(run.steps) // 10)
    steps = run.steps[first:]
    seconds = sum(lengths_of(run.seconds)[first:])
    trained = sum(step.get("tokens/trained") or 0.0 for step in steps)
    wasted = sum(step.get("staleness/wasted_tokens") or 0.0 for step in steps)
    context = _mean_context(run)
    return loop_mfu(
        _flops(shape, trained + wasted, context), _flops(shape, trained, context), seconds, run.devices, peak
    )


def _flops(shape: Shape, tokens: float, context: float) -> float:
    return forward_flops(shape.parameters, tokens, shape.layers * shape.width("q_proj"), context)


def _mean_context(run: RunRecord) -> float:
    """Returns the mean number of positions that a completion token attends to."""
    prompts = [len(sample.prompt_ids) for sample in run.samples if sample.prompt_ids]
    lengths = [step["completions/length_mean"] for step in run.steps if step.get("completions/length_mean")]
    return (fmean(prompts) if prompts else 0.0) + (fmean(lengths) if lengths else 0.0) / 2
