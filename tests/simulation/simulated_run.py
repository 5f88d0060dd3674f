"""Simulates whole runs on virtual time: the real controller, gate and journal call fake services without links.

    result = simulate(Scenario(policy="drop", seed=3))

`Invariants` are checked at every event. A run ends with numbers and with a digest of everything that happened.
"""

import asyncio
import random
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal.audit import Audit
from asyncrl.controller.journal.ledger import AttemptStarted, Dropped
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.observers.events import Event, SampleScored, StepBegan, StepLost
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.staleness import live
from asyncrl.simulation import virtual_loop
from asyncrl.simulation.fakes.fake_service import FakeService, Pace, steady
from asyncrl.simulation.fakes.generation import FakeGeneration, Lengths, stragglers
from asyncrl.simulation.fakes.scoring import MANY, FakeCritic, FakeReference, FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from asyncrl.simulation.resumable_run import ResumableRun, RunShape

LIVES = 4
"""Deaths of the controller in one run at most: a run whose controller always dies before a checkpoint never ends."""


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Gives the mean seconds between two deaths of a worker, of the controller with its trainer, and between two losses
    of a row; 0 means never. power: share of the controller's deaths that are power cuts, which lose unsynced bytes.
    restart: seconds until a worker is back."""

    generation: float = 0.0
    reward: float = 0.0
    reference: float = 0.0
    row: float = 0.0
    controller: float = 0.0
    power: float = 0.0
    restart: float = 5.0


@dataclass(frozen=True, slots=True)
class Scenario(RunShape):
    """Describes a run to simulate.

    reference, critic: delay of a call, None without the service. The algorithm is GRPO; ReMax with `greedy`; PPO with a
    critic; Safe RLHF if it is also `constrained`, with a cost service and a cost critic as slow as reward and critic.
    reward_calls: calls that the reward service works on at one time. pace: by how much longer the work of a service
    takes, by its name. thorough: compare gate and journal after every event instead of after every step.
    """

    groups: int = 8
    members: int = 8
    limit: int = 2
    slots: int = 192
    cut_at: int | None = 4
    steps: int = 20
    checkpoint_every: int = 2
    lengths: Lengths = field(default_factory=lambda: stragglers(100, 0.05, 10))
    token_time: float = 0.1
    cost: StepCost = field(default_factory=lambda: StepCost(4.0))
    reward_delay: float = 0.1
    reward_calls: int = MANY
    reference: float | None = None
    critic: float | None = None
    constrained: bool = False
    faults: FaultRates = FaultRates()
    deadline: float = 1e6
    thorough: bool = True
    gate_class: type[Gate] = Gate
    pace: Mapping[str, Pace] = field(default_factory=dict)


@dataclass
class SimulationResult:
    """Holds the numbers of a run since its last resume.

    digest: hash of every event with its time, and of the journal. idle: share of the time in which the trainer had no
    batch to train. generating: seconds of all generation slots. lengths: tokens of each (group, member) that left the
    engine. live: tokens within the limit of each sample that was trained; in_loss: tokens in the loss, older ones
    included. dropped: reason of each dropped sample. deaths: how often the run was resumed. restored: samples that the
    last resume took over. staleness: mean of the tokens in the loss, by version of the trainer. in_flight: samples when
    each step begins.
    """

    seconds: float = 0.0
    version: int = 0
    digest: str = ""
    idle: float = 0.0
    generating: float = 0.0
    in_loss: int = 0
    steps_lost: int = 0
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    live: dict[tuple[int, int], int] = field(default_factory=dict)
    dropped: dict[tuple[int, int], str] = field(default_factory=dict)
    attempts_failed: int = 0
    deaths: int = 0
    restored: int = 0
    staleness: dict[int, float] = field(default_factory=dict)
    in_flight: list[int] = field(default_factory=list)

    @property
    def live_tokens(self) -> int:
        return sum(self.live.values())


class ControllerKilled(Exception):
    """Ends a run whose controller and trainer die."""


class SimulatedRun(ResumableRun):
    """Runs a scenario from its beginning, or from its last checkpoint in `store`, until it ends or is killed."""

    training: FakeTraining

    def __init__(self, scenario: Scenario, store: MemoryStore, life: int) -> None:
        super().__init__(
            scenario, store, self._check_training, thorough=scenario.thorough, gate_class=scenario.gate_class
        )
        self.scenario = scenario
        self.store = store
        self.life = life
        self.result = SimulationResult(deaths=life, restored=sum(len(members) for _, members in self.restored))
        self._events = sha256()
        self._trained_before = self.journal.ledger.trained
        self.make_controller(self._make_services(), scenario.deadline, self._observe)
        self.controller.worker_lives("generation", self.generation.instance)

    def _make_services(self) -> Fleet:
        scenario = self.scenario
        self.generation = FakeGeneration(scenario.slots, scenario.token_time, scenario.lengths, scenario.flip_time)
        self.reward = FakeReward(scenario.reward_delay, scenario.unscorable, at_once=scenario.reward_calls)
        self.reference = cost = None
        self.owners: list[FakeService] = [self.generation]
        if scenario.reference is not None:
            self.reference = FakeReference(scenario.reference, [self.generation])
            self.owners.append(self.reference)
        critics: list[FakeCritic] = []
        if scenario.critic is not None:
            critics.append(FakeCritic(scenario.critic, scenario.cost.fixed))
            if scenario.constrained:
                cost = FakeReward(scenario.reward_delay, scenario.unscorable)
                critics.append(FakeCritic(scenario.critic, scenario.cost.fixed, signal="cost"))
        self.owners += critics
        for critic in critics:
            critic.read_from(self.owners)
        training = FakeTraining(scenario.cost, scenario.enforced_limit, self.owners, scenario.seed)
        paced: tuple[FakeService, ...] = (self.generation, self.reward, training)
        for service in paced:
            service.pace = scenario.pace.get(service.service, steady)
        training.disk = self.generation.disk = self.store
        if self.plan is not None:
            for service in (*self.owners, training):
                service.incarnation = self.plan.incarnation
            training.restore(self.plan.version, self.plan.ledger.chain)
            for critic in critics:
                critic.restore(self.plan.version)
        first, second = (*critics, None, None)[:2]
        return Fleet(
            self.generation, self.reward, training, self.reference, critic=first, cost=cost, cost_critic=second
        )

    def _observe(self, event: Event) -> None:
        result = self.result
        self._events.update(f"{asyncio.get_running_loop().time()!r} {event!r}\n".encode())
        match event:
            case SampleScored(sample):
                result.lengths[sample.key] = sample.tokens
            case Dropped(group, members, reason):
                result.dropped.update({(group, member): reason for member in members})
            case AttemptStarted():
                result.attempts_failed += 1
            case StepLost():
                result.steps_lost += 1
            case StepBegan():
                result.in_flight.append(self.gate.in_flight)
        self.invariants.observe(event)

    async def run(self) -> SimulationResult:
        """Runs to the end. Raises what the controller raises, AssertionError, and TimeoutError past the deadline."""
        faults = {f"faults {number}": fault for number, fault in enumerate(self._faults())}
        async with asyncio.timeout(self.scenario.deadline):
            await self.run_controller({"invariants": self.invariants.watch(), **faults})
        audit = Audit(self.store)
        assert audit.ok, str(audit)
        return self._finished()

    def _faults(self) -> Iterator[Coroutine[Any, Any, None]]:
        faults = self.scenario.faults
        chance = random.Random(f"faults {self.scenario.seed} {self.life}")
        means = ((self.generation, faults.generation), (self.reward, faults.reward), (self.reference, faults.reference))
        for service, mean in means:
            if service is not None and mean:
                yield self._kill(service, mean, random.Random(chance.random()))
        if faults.row:
            yield self._lose_rows(faults.row, random.Random(chance.random()))
        if faults.controller and self.life < LIVES:
            yield self._die(chance.expovariate(1 / faults.controller))

    async def _kill(self, service: FakeService, mean: float, chance: random.Random) -> None:
        while True:
            await asyncio.sleep(chance.expovariate(1 / mean))
            instance = service.instance
            running = self.generation.groups_at_work() if service is self.generation else ()
            self.controller.worker_lost(instance, "killed", running)
            service.die()
            await self.training.detached(instance)
            await asyncio.sleep(self.scenario.faults.restart)
            service.come_back()
            self.controller.worker_lives(service.service, service.instance)
            await self.controller.worker_started(service.service)

    async def _die(self, after: float) -> None:
        await asyncio.sleep(after)
        self.store.freeze()  # First: a task that is cancelled must not write what a dead process cannot write.
        raise ControllerKilled

    async def _lose_rows(self, mean: float, chance: random.Random) -> None:
        while True:
            await asyncio.sleep(chance.expovariate(1 / mean))
            self.generation.lose_row(chance)

    def _check_training(self) -> None:
        training = self.training
        assert len(training.trained) == training.samples_trained, "a sample was trained twice"
        journaled = self.journal.ledger.trained - self._trained_before
        assert journaled == training.samples_trained, "the journal's `trained` is not what entered the loss"
        if self.gate.rule.bounded:
            assert training.oldest <= self.scenario.limit, "a token over the limit is in the loss"

    def check_end(self) -> None:
        super().check_end()
        self._check_rows()

    def _check_rows(self) -> None:
        """Checks that every stored row belongs to a sample in flight, so that none leaks."""
        most = self.gate.in_flight + self.gate.awaited
        for service in self.owners:
            left = service.stored_rows
            assert left <= most, f"{service.instance} holds {left} rows for {self.gate.in_flight} samples in flight"
            for (group, member), attempt in service.stored_attempts.items():
                current = self.gate.group(group).samples[member].attempt
                assert attempt == current, f"{service.instance} holds a row of attempt {attempt} of {group, member}"

    def _finished(self) -> SimulationResult:
        result = self.result
        training = self.training
        result.seconds = asyncio.get_running_loop().time()
        result.version = self.gate.version
        result.digest = f"{self._events.hexdigest()[:32]}-{self.journal.crc:08x}"
        result.idle = 1.0 - (training.busy + training.blocked) / result.seconds
        result.generating = self.generation.busy
        result.in_loss = training.in_loss
        result.staleness = {version: float(np.mean(ages)) for version, ages in self._ages_in_loss().items()}
        result.live = {
            key: int(live(stamps, version, self.scenario.limit).sum())
            for key, (stamps, version) in training.trained.items()
        }
        return result

    def _ages_in_loss(self) -> dict[int, list[int]]:
        """Returns the staleness of each token in the loss, by version of the trainer."""
        ages: dict[int, list[int]] = {}
        for stamps, version in self.training.trained.values():
            limit = version if self.scenario.enforced_limit is None else self.scenario.limit
            ages.setdefault(version, []).extend((version - stamps[live(stamps, version, limit)]).tolist())
        return {version: known for version, known in ages.items() if known}


def simulate(scenario: Scenario) -> SimulationResult:
    """Runs a scenario on a virtual loop of its own; the same scenario gives the same result."""

    async def main() -> SimulationResult:
        store = MemoryStore()
        life = 0
        chance = random.Random(f"deaths {scenario.seed}")
        while True:
            try:
                return await SimulatedRun(scenario, store, life).run()
            except ControllerKilled:
                power = chance.random() < scenario.faults.power
                store = store.after_power_cut(tail=b"torn") if power else store.after_death()
                life = life + 1

    return virtual_loop.run(main())
