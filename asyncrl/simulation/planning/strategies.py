"""HybridFlow's algorithm 2: the fastest parallel layout of one model on so many GPUs that fits into their memory.

A role spends seconds in three stages of an iteration: generation, preparation (values, reference, rewards), training.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import ceil
from typing import TypeAlias

from asyncrl.simulation.planning import formulas
from asyncrl.simulation.planning.formulas import Degrees
from asyncrl.simulation.planning.gpus import Gpu, Rates
from asyncrl.simulation.planning.job_file import StepWork
from asyncrl.simulation.planning.model_size import WIDE, ModelSize

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


class Layouts:
    """The layouts that a search may take, with the bytes of a GPU in them: here those of systems that published numbers
    are of, which have all degrees, weights in bfloat16, and optimizers that data parallel ranks share out. Experiments
    have others (`ExperimentLayouts`)."""

    def runs(self, role: str, strategy: Strategy) -> bool:
        """Returns whether a role may have the strategy."""
        return True

    def budgets(self, sizes: Mapping[str, ModelSize], work: StepWork, whole: float) -> Iterable[Sequence[float]]:
        """Yields ways in which roles share the bytes of a GPU, best first. sizes: of the models of the roles."""
        weights = [weight_of(role, size) for role, size in sizes.items()]
        return ([whole * weight / sum(weights) for weight in weights],)

    def variants(self, role: str, degrees: Degrees) -> Iterable[Sequence[Degrees]]:
        """Yields ways to take less memory with these degrees, each from the fastest to the smallest."""
        return ((degrees,),)

    def taken(self, role: str, size: ModelSize, degrees: Degrees, work: StepWork) -> float:
        """Returns the bytes of a GPU that trains or scores."""
        return _bytes_of(role)(size, degrees, work.tokens)

    def kept(self, role: str, size: ModelSize, degrees: Degrees, work: StepWork) -> float:
        """Returns those of them that are there while an actor generates: no activations."""
        return _bytes_of(role)(size, degrees, 0)

    def sampling(self, size: ModelSize, generate: Degrees, work: StepWork, free: float, most: int) -> tuple[int, float]:
        """Returns for how many sequences of a replica, at most `most`, the free bytes of a GPU have room, and the bytes
        that a GPU takes with them."""
        weights = WIDE * size.parameters / generate.replica
        room = min(most, formulas.room_for(size, free - weights, work.tokens, generate))
        return room, weights + room * work.tokens * size.cache_bytes / generate.replica


def _bytes_of(role: str) -> Callable[[ModelSize, Degrees, float], float]:
    return formulas.training_bytes if role in TRAINED else formulas.scoring_bytes


PUBLISHED = Layouts()


def stage_seconds(role: str, size: ModelSize, strategy: Strategy, work: StepWork, rates: Rates) -> Stages:
    """Returns the seconds of each stage in which the role works, at one level of efficiency."""
    length = work.tokens
    train = strategy.degrees
    generate = strategy.generate
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


def auto_parallel(
    role: str,
    size: ModelSize,
    gpus: int,
    budget: float,
    gpu: Gpu,
    work: StepWork,
    fixed: tuple[int, int] | None = None,
    known: Layouts = PUBLISHED,
) -> Strategy | None:
    """Returns the fastest strategy on so many GPUs, or None where no layout fits into `budget` bytes of each GPU.

    As the paper does for the actor, the layout of training is chosen first, then that of generation in what is left.
    fixed: tensor and pipeline parallel degrees to take. known: layouts that may be taken.
    """
    rates = gpu.likely
    cost = partial(stage_seconds, role, size, work=work, rates=rates)

    def fastest(those: Iterable[Strategy]) -> Strategy | None:
        return next((each for each in sorted(those, key=lambda each: sum(cost(each))) if known.runs(role, each)), None)

    if role == "generation":
        found = generation_layouts(size, gpus, budget, Degrees(gpus, gpus), work, gpu, 0.0, known, fixed)
        return fastest(found)
    fitting = list(layouts(role, size, gpus, budget, gpu, work, known, fixed))
    if not fitting:
        return None
    if role != "actor":
        return fastest(fitting)
    for train in sorted(fitting, key=lambda each: _training_cost(size, each, work, rates)):
        kept = known.kept(role, size, train.degrees, work)
        found = generation_layouts(size, gpus, budget, train.degrees, work, gpu, kept, known)
        if best := fastest(found):
            return best
    return None


def layouts(
    role: str,
    size: ModelSize,
    gpus: int,
    budget: float,
    gpu: Gpu,
    work: StepWork,
    known: Layouts,
    fixed: tuple[int, int] | None = None,
) -> Iterator[Strategy]:
    """Yields the layouts of training or scoring that fit: tp within a host, pp over layers, ep over data parallel
    ranks."""
    alone = "training" if role == "actor" else role  # How an actor generates is chosen later.
    for tp, pp in [fixed] if fixed else degree_pairs(size, gpus, gpu):
        if gpus % (tp * pp):
            continue
        dp = gpus // (tp * pp)
        experts = [ep for ep in powers(dp) if dp % ep == 0 and size.experts % ep == 0] if size.experts else [1]
        for plain in (Degrees(tp, pp, dp, ep) for ep in experts):
            for ladder in known.variants(role, plain):
                fitting = (
                    Strategy(each, each, 0, taken)
                    for each in ladder
                    if (taken := known.taken(role, size, each, work)) <= budget
                )
                yield from islice((each for each in fitting if known.runs(alone, each)), 1)


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
    known: Layouts,
    fixed: tuple[int, int] | None = None,
) -> Iterator[Strategy]:
    """Yields the layouts of generation that have room for one sequence. train: layout that shares the GPUs, whose
    degrees those of generation divide. kept: bytes of a GPU that training keeps meanwhile."""
    alone = train.gpus != gpus
    for tp, pp in [fixed] if fixed else degree_pairs(size, gpus, gpu):
        if gpus % (tp * pp) or not (alone or train.tp % tp == train.pp % pp == 0):
            continue
        generate = Degrees(tp, pp, gpus // (tp * pp))
        most = ceil(work.samples / generate.dp)
        room, taken = known.sampling(size, generate, work, budget - kept, min(most, work.sequences or most))
        if room:
            yield Strategy(Degrees(dp=0) if alone else train, generate, room, kept + taken)


def weight_of(role: str, size: ModelSize) -> float:
    """Returns by how many bytes a role counts when roles share the memory of a GPU."""
    states = STATES if role in TRAINED else 0
    return size.parameters * (states + (2 * WIDE if role in GENERATING else 0) + (0 if states else WIDE))


def powers(most: int) -> list[int]:
    """Returns the powers of two up to `most`."""
    return [1 << exponent for exponent in range(most.bit_length())] if most > 0 else []


def _training_cost(size: ModelSize, strategy: Strategy, work: StepWork, rates: Rates) -> float:
    return formulas.training_seconds(size, rates, work.samples, work.tokens, strategy.degrees, work.updates)
