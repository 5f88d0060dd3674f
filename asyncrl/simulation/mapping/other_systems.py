"""Seconds of a PPO iteration in systems that HybridFlow was compared with, by their mechanisms (its table 1 and 8.1).

    DeepSpeed-Chat   all models on all GPUs in turn; fully sharded training; weights gathered whole for generation, with
                     tensor parallelism within a host
    OpenRLHF         actor, its copy for generation, critic, and the two scoring models on a quarter of the GPUs each;
                     fully sharded training; weights copied from the actor to its copy

NeMo-Aligner is left out: by the paper it generates without a cache of keys and values, which would take some hundred
times as long, and the share of an iteration that the paper gives for it does not fit that.
"""

from math import ceil

from asyncrl.errors import ConfigError
from asyncrl.simulation.cost_model import formulas
from asyncrl.simulation.cost_model.formulas import Degrees
from asyncrl.simulation.cost_model.gpus import Gpu, Rates
from asyncrl.simulation.cost_model.model_size import WIDE, ModelSize
from asyncrl.simulation.cost_model.predictions import USABLE
from asyncrl.simulation.mapping.job_file import PlannedJob
from asyncrl.simulation.mapping.strategies import STATES

MICRO_BATCH = 4
"""Samples of a GPU in one pass of fully sharded training, as in examples of both systems."""


def deepspeed_chat_seconds(job: PlannedJob, level: int) -> float:
    """Returns the seconds of an iteration at one level of efficiency."""
    group = job.groups[0]
    work = job.work
    rates = group.gpu.levels[level]
    count = group.count
    held = (2 * STATES + 2 * WIDE) * job.sizes["actor"].parameters / count
    tp = min(group.each, count)
    seconds = _generation(job, group.gpu, rates, Degrees(tp, 1, count // tp), held)
    seconds += formulas.transition_seconds(job.sizes["actor"], rates, Degrees(dp=count), Degrees(tp), "sharded")
    for role in ("critic", "reference", "reward"):
        seconds += sharded_scoring_seconds(job.sizes[role], rates, work.samples, work.tokens, count)
    return seconds + sum(_training(job, role, rates, count) for role in ("actor", "critic"))


def open_rlhf_seconds(job: PlannedJob, level: int) -> float:
    """Returns the seconds of an iteration at one level of efficiency."""
    group = job.groups[0]
    work = job.work
    rates = group.gpu.levels[level]
    quarter = group.count // 4
    if quarter < 1:
        raise ConfigError("OpenRLHF's placement needs four GPUs at least")
    actor = job.sizes["actor"]
    tp = next(tp for tp in (1, 2, 4, 8) if tp == 8 or WIDE * actor.parameters / tp < group.gpu.memory / 2)
    tp = min(tp, quarter)
    seconds = _generation(job, group.gpu, rates, Degrees(tp, 1, quarter // tp), 0.0)
    seconds += formulas.transition_seconds(actor, rates, Degrees(dp=group.count), Degrees(tp), "copied")
    scored = [
        sharded_scoring_seconds(job.sizes[role], rates, work.samples, work.tokens, quarter)
        for role in ("critic", "reference", "reward")
    ]
    return (
        seconds
        + max(scored[0], scored[1] + scored[2])
        + max(_training(job, role, rates, quarter) for role in ("actor", "critic"))
    )


def sharded_scoring_seconds(size: ModelSize, rates: Rates, samples: int, length: float, gpus: int) -> float:
    """Returns seconds of a forward pass of fully sharded parameters, gathered once for each micro-batch (Z)."""
    work = formulas.scoring_seconds(size, rates, samples, length, Degrees(dp=gpus))
    passes = ceil(samples / gpus / MICRO_BATCH)
    return work + passes * formulas.gather(rates, WIDE * size.parameters, gpus, gpus, 1)


def _training(job: PlannedJob, role: str, rates: Rates, gpus: int) -> float:
    work = job.work
    return formulas.sharded_training_seconds(
        job.sizes[role], rates, work.samples, work.tokens, gpus, work.updates, MICRO_BATCH
    )


def _generation(job: PlannedJob, gpu: Gpu, rates: Rates, degrees: Degrees, held: float) -> float:
    work = job.work
    size = job.sizes["actor"]
    free = USABLE * gpu.memory - held - WIDE * size.parameters / degrees.replica
    room = formulas.room_for(size, free, work.tokens, degrees)
    if not room:
        raise ConfigError(f"{size.name} does not generate on {degrees.gpus} GPUs")
    sequences = ceil(work.samples / degrees.dp)
    lengths = work.prompt_tokens, work.response_tokens
    return formulas.generation_seconds(size, rates, sequences, *lengths, degrees, min(room, sequences))
