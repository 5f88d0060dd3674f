"""Simulates whole runs on virtual time: the real controller, gate and journal call fake services without links.

    result = simulate(Scenario(policy="drop", seed=3))

`invariants.py` checks a run at every event. A run ends with numbers and with a digest of everything that happened.
"""

import asyncio
import random
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from asyncrl.algorithms import grpo, ppo, remax, safe_rlhf
from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.algorithm import Algorithm
from asyncrl.controller.controller import Controller, Schedule
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal.audit import AuditReport, audit_store
from asyncrl.controller.journal.checkpoints import ResumePlan, commit, plan_resume, resume
from asyncrl.controller.journal.journal_store import MemoryStore
from asyncrl.controller.journal.ledger import Journal
from asyncrl.controller.observers.events import AttemptFailed, Event, SampleScored, SamplesDropped, StepLost
from asyncrl.controller.rollouts import Sampling
from asyncrl.errors import root_cause
from asyncrl.fleet.fleet import Fleet
from asyncrl.objectives.advantages import Advantages, GreedyBaseline, GroupBaseline, Rewards
from asyncrl.protocols.staleness import Policy, live
from asyncrl.simulation import virtual_loop
from asyncrl.simulation.fakes.fake_service import FakeService
from asyncrl.simulation.fakes.generation import FakeGeneration, Lengths, stragglers
from asyncrl.simulation.fakes.scoring import FakeCritic, FakeReference, FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from asyncrl.simulation.invariants import Invariants

MOST_TOKENS = 4096
"""Tokens of a completion at most, more than any distribution of lengths gives."""
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
class Scenario:
    """Describes a run to simulate; times are virtual seconds.

    groups, members, limit, policy, slots, cut_at, need_signal, greedy: configure the gate. reference, critic: delay of
    a call, None without the service. The algorithm is GRPO; ReMax with `greedy`; PPO with a critic; Safe RLHF if it is
    also `constrained`, with a cost service and a cost critic as slow as reward and critic.
    thorough: compare gate and journal after every event instead of after every step.
    """

    policy: Policy = "mask"
    seed: int = 0
    groups: int = 8
    members: int = 8
    limit: int = 2
    slots: int = 192
    cut_at: int | None = 4
    steps: int = 20
    lengths: Lengths = field(default_factory=lambda: stragglers(100, 0.05, 10))
    token_time: float = 0.1
    flip_time: float = 0.0
    cost: StepCost = field(default_factory=lambda: StepCost(4.0))
    reward_delay: float = 0.1
    unscorable: float = 0.0
    reference: float | None = None
    critic: float | None = None
    constrained: bool = False
    faults: FaultRates = FaultRates()
    finish: Literal["abandon", "drain"] = "abandon"
    checkpoint_every: int = 2
    deadline: float = 1e6
    thorough: bool = True
    gate_class: type[Gate] = Gate
    need_signal: bool = False
    greedy: bool = False

    @property
    def gate(self) -> GateConfig:
        sizes = self.groups, self.members, self.limit, self.policy, self.slots, self.cut_at
        return GateConfig(*sizes, 1 if self.greedy else 2, self.need_signal, self.greedy)


@dataclass
class SimulationResult:
    """Holds the numbers of a run since its last resume.

    digest: hash of every event with its time, and of the journal. training, blocked: seconds of the trainer in steps,
    and waiting for a slot of the weight arena. generating: seconds of all generation slots.
    lengths: tokens of each (group, member) that left the engine. live: tokens within the limit of each sample that was
    trained; in_loss: tokens in the loss, older ones included. dropped: reason of each dropped sample.
    deaths: how often the run was resumed; audit: report on the whole run.
    """

    seconds: float = 0.0
    version: int = 0
    digest: str = ""
    training: float = 0.0
    blocked: float = 0.0
    generating: float = 0.0
    in_loss: int = 0
    steps_lost: int = 0
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    live: dict[tuple[int, int], int] = field(default_factory=dict)
    dropped: dict[tuple[int, int], str] = field(default_factory=dict)
    attempts_failed: int = 0
    deaths: int = 0
    audit: AuditReport | None = None

    @property
    def live_tokens(self) -> int:
        return sum(self.live.values())

    @property
    def idle(self) -> float:
        """Share of the time in which the trainer had no batch to train."""
        return 1.0 - (self.training + self.blocked) / self.seconds


class EventCounts:
    """Hashes and counts the events of a run."""

    def __init__(self, result: SimulationResult) -> None:
        self._result = result
        self._hash = sha256()

    def observe(self, event: Event) -> None:
        self._hash.update(f"{asyncio.get_running_loop().time()!r} {event!r}\n".encode())
        match event:
            case SampleScored(sample):
                self._result.lengths[sample.key] = sample.tokens
            case SamplesDropped(group, members, reason):
                self._result.dropped.update({(group, member): reason for member in members})
            case AttemptFailed():
                self._result.attempts_failed += 1
            case StepLost():
                self._result.steps_lost += 1

    def digest(self, journal: Journal) -> str:
        return f"{self._hash.hexdigest()[:32]}-{journal.crc:08x}"


class ControllerKilled(Exception):
    """Ends a run whose controller and trainer die."""


class SimulatedRun:
    """Runs a scenario from its beginning, or from its last checkpoint in `store`, until it ends or is killed."""

    def __init__(self, scenario: Scenario, store: MemoryStore, life: int) -> None:
        self.scenario = scenario
        self.store = store
        self.life = life
        self.result = SimulationResult(deaths=life)
        self._make_services()
        self._resume(plan_resume(store))
        self.invariants = Invariants(self.gate, self.journal, self._check_training, thorough=scenario.thorough)
        self.counts = EventCounts(self.result)
        algorithm, advantages = _algorithm(scenario)
        self.algorithm = algorithm
        self.controller = self._controller(advantages)
        self.controller.worker_lives("generation", self.generation.instance)

    def _make_services(self) -> None:
        scenario, seconds = self.scenario, self.scenario.cost.fixed
        self.generation = FakeGeneration(scenario.slots, scenario.token_time, scenario.lengths, scenario.flip_time)
        self.reward = FakeReward(scenario.reward_delay, scenario.unscorable)
        self.owners: list[FakeService] = [self.generation]
        self.reference: FakeReference | None = None
        self.cost: FakeReward | None = None
        self.critics: list[FakeCritic] = []
        if scenario.reference is not None:
            self.reference = FakeReference(scenario.reference, [self.generation])
            self.owners.append(self.reference)
        if scenario.critic is not None:
            self.critics = [FakeCritic(scenario.critic, seconds)]
            if scenario.constrained:
                self.cost = FakeReward(scenario.reward_delay, scenario.unscorable)
                self.critics.append(FakeCritic(scenario.critic, seconds, signal="cost"))
        self.owners += self.critics
        for critic in self.critics:
            critic.read_from(self.owners)
        limit = None if scenario.policy == "admit" else scenario.limit
        self.training = FakeTraining(scenario.cost, limit, self.owners, scenario.seed)

    def _resume(self, plan: ResumePlan | None) -> None:
        config = self.scenario.gate
        self._committed = plan.version if plan else -1
        self.journal = resume(self.store, plan) if plan else Journal(self.store)
        self.gate = self.scenario.gate_class(config, *((plan.version, plan.next_group) if plan else ()))
        if plan is None:
            return
        for group in plan.groups:
            self.gate.restore(group)
        for service in (*self.owners, self.training):
            service.run_in(plan.incarnation)
        self.training.restore(plan.version, bytes.fromhex(plan.chain))
        for critic in self.critics:
            critic.restore(plan.version)

    def _controller(self, advantages: Advantages) -> Controller:
        return Controller(
            self.gate,
            self.journal,
            Fleet(
                self.generation,
                self.reward,
                self.training,
                self.reference,
                critic=next(iter(self.critics), None),
                cost=self.cost,
                cost_critic=self.critics[1] if self.cost else None,
            ),
            prompts=lambda group: (f"prompt {group}", {}),
            sampling=Sampling(
                1.0, MOST_TOKENS, self.scenario.deadline, self.scenario.seed, self.journal.ledger.incarnation
            ),
            advantages=advantages,
            schedule=Schedule(self.scenario.steps, self.scenario.finish),
            between=self._between,
            observe=self._observe,
        )

    async def _between(self, version: int) -> None:
        if self._committed < 0 or version - self._committed >= self.scenario.checkpoint_every:
            await self._commit(version)

    async def _commit(self, version: int) -> None:
        incarnation = self.journal.ledger.incarnation
        await commit(self.journal, lambda place: self.training.checkpoint(place, incarnation, version), keep=2)
        self._committed = version

    def _observe(self, event: Event) -> None:
        self.counts.observe(event)
        self.invariants.observe(event)

    async def run(self) -> SimulationResult:
        """Runs to the end. Raises what the controller raises, AssertionError, and TimeoutError past the deadline."""
        try:
            async with asyncio.timeout(self.scenario.deadline), asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(watch, name="beside") for watch in (self.invariants.watch(), *self._faults())
                ]
                await self.controller.run(self.algorithm)
                for task in beside:
                    task.cancel()
                await self._commit(self.gate.version)
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from None
        self.invariants.check()
        self.result.audit = audit_store(self.store)
        assert self.result.audit.ok, str(self.result.audit)
        self._check_rows()
        return self._finished()

    def _faults(self) -> Iterator[Coroutine[Any, Any, None]]:
        faults, chance = self.scenario.faults, random.Random(f"faults {self.scenario.seed} {self.life}")
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
            self.controller.worker_lives(service.context.service, service.instance)
            await self.controller.worker_started(service.context.service)

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
        if self.scenario.policy != "admit":
            assert training.oldest <= self.scenario.limit, "a token over the limit is in the loss"

    def _check_rows(self) -> None:
        """Checks that every stored row belongs to a sample in flight, so that none leaks."""
        most = self.gate.in_flight + self.gate.awaited
        for service in self.owners:
            left = service.stored_rows
            assert left <= most, f"{service.instance} holds {left} rows for {self.gate.in_flight} samples in flight"
            for (group, member), attempt in service.stored_attempts.items():
                current = self.gate.group(group).attempt
                assert attempt == current, f"{service.instance} holds a row of attempt {attempt} of {group, member}"

    def _finished(self) -> SimulationResult:
        result, training = self.result, self.training
        result.seconds = asyncio.get_running_loop().time()
        result.version = self.gate.version
        result.digest = self.counts.digest(self.journal)
        result.training = training.busy
        result.blocked = training.blocked
        result.generating = self.generation.busy
        result.in_loss = training.in_loss
        result.live = {
            key: int(live(stamps, version, self.scenario.limit).sum())
            for key, (stamps, version) in training.trained.items()
        }
        return result


def _algorithm(scenario: Scenario) -> tuple[Algorithm, Advantages]:
    if scenario.critic is not None:
        return safe_rlhf.ALGORITHM if scenario.constrained else ppo.ALGORITHM, Rewards()
    return (remax.ALGORITHM, GreedyBaseline()) if scenario.greedy else (grpo.ALGORITHM, GroupBaseline())


def simulate(scenario: Scenario) -> SimulationResult:
    """Runs a scenario on a virtual loop of its own; the same scenario gives the same result."""

    async def main() -> SimulationResult:
        store, life, chance = MemoryStore(), 0, random.Random(f"deaths {scenario.seed}")
        while True:
            try:
                return await SimulatedRun(scenario, store, life).run()
            except ControllerKilled:
                power = chance.random() < scenario.faults.power
                store, life = store.after_power_cut(tail=b"torn") if power else store.after_death(), life + 1

    return virtual_loop.run(main())
