"""Runs controller, gate and journal on virtual time, with stages that take modelled seconds."""

import asyncio
import math
import random
from dataclasses import dataclass
from statistics import fmean

from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.observers.events import Event, StepDone
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef
from asyncrl.simulation import virtual_loop
from asyncrl.simulation.fakes.fake_service import FakeService
from asyncrl.simulation.fakes.generation import Lengths
from asyncrl.simulation.fakes.scoring import FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from asyncrl.simulation.predicted_run.modelled_generation import ModelledGeneration, StepSeconds
from asyncrl.simulation.resumable_run import ResumableRun, RunShape

DEADLINE = 1e9
"""Virtual seconds in which every sample ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledStages(RunShape):
    """A run whose stages have modelled times. replicas of `slots` sequences each; step: seconds of a decode step by the
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
class ModelledSchedule:
    """Describes the measured steps. seconds: in which as many tokens train as a step samples. generating, training:
    shares of the time in which replicas and trainer had work. staleness: mean of the tokens in the loss. masked: share
    of the tokens of trained samples that were too old for the loss."""

    seconds: float
    generating: float
    training: float
    staleness: float
    masked: float


class ModelledRun(ResumableRun):
    """Runs the stages from their first step."""

    training: FakeTraining

    def __init__(self, stages: ModelledStages) -> None:
        super().__init__(stages, MemoryStore(), lambda: None, thorough=False)
        self._stages = stages
        self._marks: list[tuple[float, float, list[float]]] = []
        self._masked = 0
        self.generation = ModelledGeneration(
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

    async def run(self) -> ModelledSchedule:
        await self.run_controller({})
        (began, busy_before, before), (ended, busy, _) = self._marks[0], self._marks[-1]
        seconds = ended - began
        first = self._stages.warm_up
        grown = zip(self._marks[-1][2], before, strict=True)
        ages = {key: at - stamps for key, (stamps, at) in self.training.trained.items() if at >= first}
        masked = self._masked / max(1, self._masked + sum(map(len, ages.values())))
        return ModelledSchedule(
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


def run_stages(stages: ModelledStages) -> ModelledSchedule:
    """Runs on a virtual loop of its own; the same stages give the same schedule."""

    async def main() -> ModelledSchedule:
        return await ModelledRun(stages).run()

    return virtual_loop.run(main())


def drawn_lengths(mean: float, spread: float, longest: int) -> Lengths:
    """Draws lognormal lengths of this mean, cut at `longest`; spread: standard deviation of the logarithm."""
    if not spread:
        return lambda chance: max(1, round(mean))
    location = math.log(mean) - spread**2 / 2

    def draw(chance: random.Random) -> int:
        return min(longest, max(1, round(chance.lognormvariate(location, spread))))

    return draw
