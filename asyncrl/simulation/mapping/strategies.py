"""HybridFlow's algorithm 2: the fastest parallel layout of one model on so many GPUs that fits into their memory.

A role spends seconds in three stages of an iteration: generation, preparation (values, reference, rewards), training.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TypeAlias

from asyncrl.simulation.cost_model import formulas
from asyncrl.simulation.cost_model.formulas import Degrees
from asyncrl.simulation.cost_model.gpus import Gpu, Rates
from asyncrl.simulation.cost_model.model_size import WIDE, ModelSize
from asyncrl.simulation.mapping.job_file import StepWork

STAGES = ("generation", "preparation", "training")
Stages: TypeAlias = tuple[float, float, float]
GENERATING = ("actor", "generation")
TRAINED = ("actor", "training", "critic", "cost_critic")
STATES = formulas.GRADIENT + formulas.OPTIMIZER + WIDE
"""Bytes of a trained parameter on one GPU."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """The layouts of a role: `degrees` in which it trains or scores, `generate` in which it generates, with `room` for
    so many sequences of a replica. bytes: of each GPU, at most."""

    degrees: Degrees
    generate: Degrees
    room: int
    bytes: float

    def __str__(self) -> str:
        texts = [str(self.degrees)] if self.degrees.gpus else []
        if self.room:
            texts.append(f"generates with pp {self.generate.pp} tp {self.generate.tp} and {self.room} sequences")
        return ", ".join(texts)


Runs: TypeAlias = Callable[[str, Strategy], bool]


def stage_seconds(role: str, size: ModelSize, strategy: Strategy, work: StepWork, rates: Rates) -> Stages:
    """Returns the seconds of each stage in which the role works, at one level of efficiency."""
    length, train, generate = work.tokens, strategy.degrees, strategy.generate
    generation = preparation = training = 0.0
    if role in GENERATING:
        replicas = generate.dp
        sequences = ceil(work.samples / replicas)
        lengths = work.prompt_tokens, work.response_tokens
        generation = formulas.generation_seconds(size, rates, sequences, *lengths, generate, strategy.room)
    if role == "actor":
        generation += formulas.transition_seconds(size, rates, train, generate)
    if role not in (*GENERATING, "training") or (work.recompute and role in ("actor", "training")):
        preparation = formulas.scoring_seconds(size, rates, work.samples, length, train)
    if role in TRAINED:
        training = formulas.training_seconds(size, rates, work.samples, length, train, work.updates)
    return generation, preparation, training


def any_layout(role: str, strategy: Strategy) -> bool:
    return True


def auto_parallel(
    role: str,
    size: ModelSize,
    gpus: int,
    budget: float,
    gpu: Gpu,
    work: StepWork,
    fixed: tuple[int, int] | None = None,
    runs: Runs = any_layout,
) -> Strategy | None:
    """Returns the fastest strategy on so many GPUs, or None where no layout fits into `budget` bytes of each GPU.

    As the paper does for the actor, the layout of training is chosen first, then that of generation in what is left.
    fixed: tensor and pipeline parallel degrees to take. runs: tells of a role whether its strategy is one that may be
    taken.
    """
    rates = gpu.likely
    cost = partial(stage_seconds, role, size, work=work, rates=rates)

    def fastest(those: Iterable[Strategy]) -> Strategy | None:
        return next((each for each in sorted(those, key=lambda each: sum(cost(each))) if runs(role, each)), None)

    if role == "generation":
        found = generation_layouts(size, gpus, budget, Degrees(gpus, gpus), work, gpu, 0.0, fixed)
        return fastest(found)
    fitting = list(layouts(role, size, gpus, budget, gpu, work, fixed))
    if not fitting:
        return None
    if role != "actor":
        return fastest(fitting)
    for train in sorted(fitting, key=lambda each: _training_cost(size, each, work, rates)):
        kept = held_bytes(role, size, train.degrees)
        found = generation_layouts(size, gpus, budget, train.degrees, work, gpu, kept)
        if best := fastest(found):
            return best
    return None


def layouts(
    role: str, size: ModelSize, gpus: int, budget: float, gpu: Gpu, work: StepWork, fixed: tuple[int, int] | None = None
) -> Iterator[Strategy]:
    """Yields the layouts of training or scoring that fit: tp within a host, pp over layers, ep over data parallel
    ranks."""
    for tp, pp in [fixed] if fixed else degree_pairs(size, gpus, gpu):
        if gpus % (tp * pp):
            continue
        dp = gpus // (tp * pp)
        experts = [ep for ep in powers(dp) if dp % ep == 0 and size.experts % ep == 0] if size.experts else [1]
        for degrees in (Degrees(tp, pp, dp, ep) for ep in experts):
            count = formulas.training_bytes if role in TRAINED else formulas.scoring_bytes
            if (taken := count(size, degrees, work.tokens)) <= budget:
                yield Strategy(degrees, degrees, 0, taken)


def degree_pairs(size: ModelSize, gpus: int, gpu: Gpu) -> Iterator[tuple[int, int]]:
    """Yields tensor and pipeline parallel degrees that divide heads and layers."""
    for tp in powers(min(gpu.gpus_per_host, gpus)):
        if size.heads % tp == 0:
            yield from ((tp, pp) for pp in powers(gpus // tp) if size.layers % pp == 0)


def generation_layouts(
    size: ModelSize,
    gpus: int,
    budget: float,
    train: Degrees,
    work: StepWork,
    gpu: Gpu,
    kept: float,
    fixed: tuple[int, int] | None = None,
) -> Iterator[Strategy]:
    """Yields the layouts of generation that have room for one sequence. train: layout that shares the GPUs, whose
    degrees those of generation divide. kept: bytes of a GPU that training keeps meanwhile."""
    alone = train.gpus != gpus
    for tp, pp in [fixed] if fixed else degree_pairs(size, gpus, gpu):
        if gpus % (tp * pp) or not (alone or train.tp % tp == train.pp % pp == 0):
            continue
        generate = Degrees(tp, pp, gpus // (tp * pp))
        weights = WIDE * size.parameters / generate.replica
        room = formulas.room_for(size, budget - kept - weights, work.tokens, generate)
        room = min(room, ceil(work.samples / generate.dp), work.sequences or room)
        if room:
            cached = room * work.tokens * size.cache_bytes / generate.replica
            yield Strategy(Degrees(dp=0) if alone else train, generate, room, kept + weights + cached)


def held_bytes(role: str, size: ModelSize, degrees: Degrees) -> float:
    """Returns bytes of a GPU that a role keeps while others work: no activations and no cache."""
    return formulas.training_bytes(size, degrees, 0) if role in TRAINED else formulas.scoring_bytes(size, degrees, 0)


def weight_of(role: str, size: ModelSize) -> float:
    """Returns by how many bytes a role counts when roles share the memory of a GPU."""
    states = STATES if role in TRAINED else 0
    return size.parameters * (states + (2 * WIDE if role in GENERATING else 0) + (0 if states else WIDE))


def powers(most: int) -> list[int]:
    """Returns the powers of two up to `most`."""
    return [1 << exponent for exponent in range(most.bit_length())] if most > 0 else []


def _training_cost(size: ModelSize, strategy: Strategy, work: StepWork, rates: Rates) -> float:
    return formulas.training_seconds(size, rates, work.samples, work.tokens, strategy.degrees, work.updates)
