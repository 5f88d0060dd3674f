"""Computes loop MFU: the share of what the devices of a run could compute that its tokens needed.

Counted are completion tokens: a forward of each that was sampled, and three times that of each that was trained
(forward and backward); prompts, embeddings that are looked up and passes for log-probs are left out. So the number is a
lower bound, and comparable between runs of one workload.
"""

from statistics import fmean

from asyncrl.bench.overlap.definitions import forward_flops, loop_mfu
from asyncrl.deploy.report.run_record import RunRecord, lengths_of
from asyncrl.engines.models.model_shape import Shape, shape_of
from asyncrl.errors import ConfigError
from asyncrl.simulation.cost_model.gpus import known_gpus
from asyncrl.telemetry.run_directory import RunDirectory


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
