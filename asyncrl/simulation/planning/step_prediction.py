"""Predicts the seconds of a step of a job in one layout: the real controller runs stages of these seconds on virtual
time.

The layout is a split of the GPUs, with a staleness limit; or all GPUs in turn, which is a synchronous step. Each level
of efficiency is one run on virtual time. Of many samples a share is simulated, with the same share of the replicas.
"""

import asyncio
import math
import random
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.observers.events import Event, StepDone
from asyncrl.errors import ConfigError
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef
from asyncrl.simulation import virtual_loop
from asyncrl.simulation.fakes.fake_service import FakeService
from asyncrl.simulation.fakes.generation import FakeReplicas, Lengths, StepSeconds
from asyncrl.simulation.fakes.scoring import FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from asyncrl.simulation.planning import formulas
from asyncrl.simulation.planning.gpus import Gpu, Rates
from asyncrl.simulation.planning.job_file import FixedSplit, MeasuredStages, PlannedJob
from asyncrl.simulation.planning.model_size import ModelSize
from asyncrl.simulation.planning.predictions import CALIBRATED, USABLE, Interval
from asyncrl.simulation.planning.strategies import PUBLISHED, Layouts, Strategy, auto_parallel, stage_seconds
from asyncrl.simulation.resumable_run import ResumableRun, RunShape

# Runs controller, gate and journal on virtual time, with stages that take these seconds.


DEADLINE = 1e9
"""Virtual seconds in which every sample ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStages(RunShape):
    """A run whose stages take given times. replicas of `slots` sequences each; step: seconds of a decode step by the
    sequences of a replica; pause: seconds without decoding while a replica takes new weights; warm_up, measured: steps
    that are left out and those that count."""

    replicas: int
    step: StepSeconds
    lengths: Lengths
    cost: StepCost
    pause: float = 0.0
    reward_delay: float = 0.0
    warm_up: int = 2
    measured: int = 5

    @property
    def all_slots(self) -> int:
        return self.replicas * self.slots


@dataclass(frozen=True, slots=True)
class SimulatedSchedule:
    """Describes the measured steps. seconds: in which as many tokens train as a step samples. generating, training:
    shares of the time in which replicas and trainer had work. staleness: mean of the tokens in the loss. masked: share
    of the tokens of trained samples that were too old for the loss."""

    seconds: float
    generating: float
    training: float
    staleness: float
    masked: float


class StagesRun(ResumableRun):
    """Runs the stages from their first step."""

    training: FakeTraining

    def __init__(self, stages: SimulatedStages) -> None:
        super().__init__(stages, MemoryStore(), lambda: None, thorough=False)
        self._stages = stages
        self._marks: list[tuple[float, float, list[float]]] = []
        self._masked = 0
        self.generation = FakeReplicas(
            stages.replicas,
            stages.slots,
            stages.step,
            stages.lengths,
            pause=stages.pause,
            rows=self.gate.config.row_slots,
            longest=stages.max_new_tokens,
        )
        owners: list[FakeService] = [self.generation]
        training = FakeTraining(stages.cost, stages.enforced_limit, owners, stages.seed, slot_patience=DEADLINE)
        reward = FakeReward(stages.reward_delay)
        self.make_controller(Fleet(self.generation, reward, training), DEADLINE, self._observe)
        self.controller.worker_lives("generation", self.generation.instance)

    def rows_to_save(self) -> BatchRef:
        """Returns no sample: no such run is resumed."""
        return BatchRef(())

    async def run(self) -> SimulatedSchedule:
        await self.run_controller({})
        (began, busy_before, before), (ended, busy, _) = self._marks[0], self._marks[-1]
        seconds = ended - began
        first = self._stages.warm_up
        grown = zip(self._marks[-1][2], before, strict=True)
        ages = {key: at - stamps for key, (stamps, at) in self.training.trained.items() if at >= first}
        masked = self._masked / max(1, self._masked + sum(map(len, ages.values())))
        return SimulatedSchedule(
            seconds=seconds / (len(self._marks) - 1) / (1.0 - masked),
            generating=fmean(after - earlier for after, earlier in grown) / seconds,
            training=(busy - busy_before) / seconds,
            staleness=fmean(float(age.mean()) for age in ages.values()),
            masked=masked,
        )

    def _observe(self, event: Event) -> None:
        match event:
            case StepDone(report=report):
                number = self.gate.version
                if number > self._stages.warm_up:
                    self._masked += sum(sample.masked for sample in report.samples)
                if self._stages.warm_up <= number <= self._stages.warm_up + self._stages.measured:
                    now = asyncio.get_running_loop().time()
                    self._marks.append((now, self.training.busy, self.generation.busy_seconds()))
        self.invariants.observe(event)


def run_stages(stages: SimulatedStages) -> SimulatedSchedule:
    """Runs on a virtual loop of its own; the same stages give the same schedule."""

    async def main() -> SimulatedSchedule:
        return await StagesRun(stages).run()

    return virtual_loop.run(main())


def drawn_lengths(mean: float, spread: float, longest: int) -> Lengths:
    """Draws lognormal lengths of this mean, cut at `longest`; spread: standard deviation of the logarithm."""
    if not spread:
        return lambda chance: max(1, round(mean))
    location = math.log(mean) - spread**2 / 2

    def draw(chance: random.Random) -> int:
        return min(longest, max(1, round(chance.lognormvariate(location, spread))))

    return draw


MOST_SAMPLES = 512
"""Samples of a step that are simulated."""
UNITS = 256
"""Steps of decoding in which the longest answer is simulated: a unit stands for several tokens."""
LEVELS = 3


@dataclass(frozen=True, slots=True)
class Scale:
    """Multiplies the modelled seconds of the stages."""

    generation: float = 1.0
    training: float = 1.0

    def slower(self, factor: float) -> "Scale":
        return Scale(self.generation * factor, self.training * factor)


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """A layout with its schedule at each level of efficiency, worst first. split: None, all GPUs work in turn."""

    split: FixedSplit | None
    limit: int
    schedules: tuple[SimulatedSchedule, ...]
    generation: Strategy
    training: Strategy

    @property
    def seconds(self) -> Interval:
        return Interval.of([each.seconds for each in self.schedules])

    @property
    def likely(self) -> SimulatedSchedule:
        return self.schedules[1]

    def speedup_over(self, other: "PredictedStep") -> Interval:
        """Returns how many times shorter a step is than in another layout, at equal efficiency."""
        pairs = zip(self.schedules, other.schedules, strict=True)
        return Interval.of([theirs.seconds / ours.seconds for ours, theirs in pairs])


class StepPredictor:
    """Predicts layouts of one job; a measured step calibrates it. known: layouts that may be taken."""

    def __init__(self, job: PlannedJob, known: Layouts = PUBLISHED) -> None:
        if len(job.groups) > 2:
            raise ConfigError("devices: name one kind of GPU, or two: that of generation and that of training")
        if "actor" not in job.sizes and {"generation", "training"} - set(job.sizes):
            raise ConfigError("models: name an actor, or generation and training")
        self.job = job
        self._known = known
        measured = job.tables.measured
        self._scale = None if measured is None else self._scale_of(measured)

    def predict(self, split: FixedSplit | None, limit: int) -> PredictedStep:
        """Predicts one layout. Raises ConfigError when a model does not fit."""
        generation, training, others = self._strategies(split)
        schedules = [
            run_stages(self._stages(split, limit, generation, training, others, level)) for level in range(LEVELS)
        ]
        return PredictedStep(split, limit, tuple(schedules), generation, training)

    def best_split(self, limit: int) -> FixedSplit:
        """Returns the split whose slower side is fastest at full load, by the cost model alone."""
        options = self.splits()
        if not options:
            raise ConfigError(f"{self.job.count} GPUs cannot be split so that the models fit: name more GPUs")
        return min(options, key=lambda split: self._full_load(split, limit))

    def splits(self) -> list[FixedSplit]:
        """Returns splits on which the models fit: halves, quarters, eighths and so on of one kind of GPU."""
        count = self.job.groups[0].count
        if len(self.job.groups) == 2:
            options = [(count, self.job.groups[1].count)]
        else:
            part = max(1, count // 16)
            options = [(number, count - number) for number in range(part, count, part)]
        found = []
        for generation, training in options:
            split = FixedSplit(generation=generation, training=training)
            try:
                self._strategies(split)
            except ConfigError:
                continue
            found.append(split)
        return found

    def _scale_of(self, measured: MeasuredStages) -> Scale:
        """Compares a measured step with the same step at likely efficiency."""
        self._scale = Scale()
        generation, training, others = self._strategies(measured.split)
        found = run_stages(self._stages(measured.split, measured.limit, generation, training, others, 1))
        trained = found.training * found.seconds
        generated = found.generating * found.seconds if measured.split else found.seconds - trained
        return Scale(measured.generation_seconds / generated, measured.training_seconds / trained)

    def _gpus(self, split: FixedSplit | None) -> tuple[tuple[int, Gpu], tuple[int, Gpu]]:
        """Returns the number and kind of GPUs of generation and of training."""
        first = self.job.groups[0]
        last = self.job.groups[-1]
        if split is None:
            return (first.count, first.gpu), (first.count, first.gpu)
        if len(self.job.groups) == 1 and split.generation + split.training > first.count:
            raise ConfigError(f"split: {split.generation} + {split.training} GPUs of {first.count}")
        return (split.generation, first.gpu), (split.training, last.gpu)

    def _strategies(self, split: FixedSplit | None) -> tuple[Strategy, Strategy, dict[str, Strategy]]:
        """Returns the layouts of generation, of training, and of the other models, which share the trainer's GPUs. Each
        has the memory to itself while it works, as where states move to the hosts' memory meanwhile."""
        job = self.job
        (generating, gpu), (training, trainer_gpu) = self._gpus(split)

        def strategy(role: str, gpus: int, kind: Gpu) -> Strategy:
            name = role if role in job.sizes else "actor"
            fixed = job.tables.layouts.get(role)
            found = auto_parallel(role, job.sizes[name], gpus, USABLE * kind.memory, kind, job.work, fixed, self._known)
            if found is None:
                raise ConfigError(f"{role} of {job.sizes[name].name} does not fit on {gpus} GPUs: give it more")
            return found

        others = {
            role: strategy(role, training, trainer_gpu)
            for role in job.sizes
            if role not in ("actor", "generation", "training")
        }
        return strategy("generation", generating, gpu), strategy("training", training, trainer_gpu), others

    @property
    def _policy(self) -> ModelSize:
        return self.job.sizes["actor" if "actor" in self.job.sizes else "training"]

    def _rates(self, gpu: Gpu, level: int) -> Rates:
        return gpu.levels[level] if self._scale is None else gpu.likely

    def _scale_at(self, level: int) -> Scale:
        """Returns the calibration with its spread: 15 % slower, likely, 15 % faster."""
        spread = (1 + CALIBRATED, 1.0, 1 / (1 + CALIBRATED))[level]
        return Scale() if self._scale is None else self._scale.slower(spread)

    def _stages(
        self,
        split: FixedSplit | None,
        limit: int,
        generation: Strategy,
        training: Strategy,
        others: dict[str, Strategy],
        level: int,
    ) -> SimulatedStages:
        """Returns the run of one level of efficiency. A synchronous one is over sooner: all its steps are alike."""
        work = self.job.work
        generate = generation.generate
        (_, gpu), (_, trainer_gpu) = self._gpus(split)
        rates = self._rates(gpu, level)
        scale = self._scale_at(level)
        sampled = Sampled.of(self.job, generate.dp)
        update = self._training_seconds(training, others, self._rates(trainer_gpu, level)) * scale.training
        if split is None:
            moved = formulas.transition_seconds(self._policy, rates, training.degrees, generate, "regrouped")
        else:
            moved = formulas.transfer_seconds(self._policy, rates, split.training, generate)
        warm_up, measured = (1, 3) if limit == 0 else (2 + limit, 5)
        return SimulatedStages(
            groups=sampled.samples // work.samples_per_prompt,
            members=work.samples_per_prompt,
            limit=limit,
            slots=generation.room,
            cut_at=None,
            steps=warm_up + measured + limit + 1,
            checkpoint_every=1 << 30,
            max_new_tokens=sampled.longest,
            replicas=sampled.replicas,
            step=self._decoding(generation, rates, sampled.unit, scale.generation),
            lengths=drawn_lengths(work.response_tokens / sampled.unit, work.spread, sampled.longest),
            cost=StepCost(moved if split is None else 0.0, update / sampled.tokens),
            pause=moved if split is not None else 0.0,
            reward_delay=self.job.tables.reward_seconds,
            warm_up=warm_up,
            measured=measured,
        )

    def _training_seconds(self, training: Strategy, others: dict[str, Strategy], rates: Rates) -> float:
        """Returns the seconds of the trainer's GPUs in a step: updates, and what other models score and train."""
        policy = stage_seconds("training", self._policy, training, self.job.work, rates)
        rest = [stage_seconds(role, self.job.sizes[role], each, self.job.work, rates) for role, each in others.items()]
        return sum(map(sum, [policy, *rest]))

    def _decoding(self, strategy: Strategy, rates: Rates, unit: int, scale: float) -> StepSeconds:
        """Returns the seconds in which each sequence of a replica gets `unit` tokens. A replica reads a prompt for each
        answer, so that each step has its share of that."""
        work = self.job.work
        generate = strategy.generate
        model = self.job.sizes.get("generation", self._policy)
        context = work.prompt_tokens + work.response_tokens * math.exp(work.spread**2) / 2
        prompt = formulas.prefill_seconds(model, rates, work.prompt_tokens * 8, work.prompt_tokens, generate) / 8

        @cache
        def seconds(sequences: int) -> float:
            decode = formulas.decode_step_seconds(model, rates, sequences, context, generate)
            return scale * unit * (decode + sequences * prompt / work.response_tokens)

        return seconds

    def _full_load(self, split: FixedSplit, limit: int) -> float:
        """Returns the seconds of the slower side of a split when neither waits."""
        generation, training, others = self._strategies(split)
        (_, gpu), (_, trainer_gpu) = self._gpus(split)
        work = self.job.work
        scale = self._scale_at(1)
        held = min(generation.room, math.ceil((limit + 1) * work.samples / generation.generate.dp))
        step = self._decoding(generation, gpu.likely, 1, scale.generation)(held)
        tokens = work.samples * work.response_tokens
        generated = tokens * step / held / generation.generate.dp
        return max(generated, scale.training * self._training_seconds(training, others, trainer_gpu.likely))


@dataclass(frozen=True, slots=True)
class Sampled:
    """The share of a job that is simulated. unit: tokens that one simulated token stands for. longest: simulated tokens
    of an answer. tokens: of a simulated step, on average."""

    samples: int
    replicas: int
    unit: int
    longest: int
    tokens: float

    @classmethod
    def of(cls, job: PlannedJob, replicas: int) -> "Sampled":
        work = job.work
        longest = work.longest_answer
        unit = math.ceil(longest / UNITS)
        simulated = max(1, min(replicas, replicas * MOST_SAMPLES // work.samples))
        groups = max(1, round(work.samples * simulated / replicas / work.samples_per_prompt))
        samples = groups * work.samples_per_prompt
        return cls(samples, simulated, unit, math.ceil(longest / unit), samples * work.response_tokens / unit)
