"""Whole runs on virtual time: the real controller, gate and journal over simulated services.

    result = simulate(Scenario(policy="drop", seed=3))

A run is checked while it goes on (`invariants.py`) and ends with numbers and with a digest of all that happened.
"""

import asyncio
import random
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from asyncrl import virtual
from asyncrl.algorithms import grpo, ppo, remax, safe_rlhf
from asyncrl.audit import AuditReport, audit_store
from asyncrl.checkpoint import ResumePlan, commit, plan_resume, resume
from asyncrl.controller import Controller, Page, Schedule
from asyncrl.errors import first
from asyncrl.events import AttemptFailed, Event, SampleScored, SamplesDropped, StepLost
from asyncrl.fleet import Fleet
from asyncrl.invariants import Invariants
from asyncrl.ledger import Journal
from asyncrl.objectives.advantages import Advantages, GreedyBaseline, GroupBaseline, Rewards
from asyncrl.rolling import Sampling
from asyncrl.simulated import (
    Host,
    Lengths,
    SimulatedGeneration,
    SimulatedReference,
    SimulatedReward,
    SimulatedTraining,
    Spans,
    StepCost,
    stragglers,
)
from asyncrl.simulated_critic import SimulatedCritic
from asyncrl.staleness import Gate, GateConfig, Policy, live
from asyncrl.store import MemoryStore

LIVES = 4
"""How often a controller dies in one run: one that dies before its next checkpoint every time would never end."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Mean seconds between two deaths of a worker, of the controller with its trainer, and between two losses of a row;
    0: never. power: share of the controller's deaths that take with them what was not synced."""

    generation: float = 0.0
    reward: float = 0.0
    reference: float = 0.0
    row: float = 0.0
    controller: float = 0.0
    power: float = 0.0
    restart: float = 5.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run to simulate; times in virtual seconds.

    groups, members, limit, policy, slots, cut_at, need_signal, greedy: of the gate. reference, critic: their delay,
    None without one; with a critic the page is PPO's, and where it is constrained that of Safe RLHF, with a cost
    service and a cost critic that are as slow as the others; with greedy answers it is ReMax's.
    thorough: compare gate and journal after every event, not only after every step.
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
    faults: Faults = Faults()
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
class Result:
    """What a run did, since it was taken up last. digest: of every event with its time, and of the journal.
    deaths: how often it was taken up; audit: of the whole run.

    lengths: tokens of each (group, member) that left the engine. live: of each in the loss, its tokens within the
    limit (under `admit` the others are in the loss too: in_loss counts all). dropped: reason of each sample dropped.
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
        """Share of the time that the trainer had no batch to train."""
        return 1.0 - (self.training + self.blocked) / self.seconds


class Recorder:
    """Hashes and counts events."""

    def __init__(self, result: Result) -> None:
        self._result, self._hash = result, sha256()

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


class Killed(Exception):
    """The controller and its trainer died."""


class Run:
    """The parts of one run, from its beginning or its last checkpoint in `store` until it ends or is killed."""

    def __init__(self, scenario: Scenario, store: MemoryStore, life: int) -> None:
        self.scenario, self.store, self.life, self.result = scenario, store, life, Result(deaths=life)
        self.generation = SimulatedGeneration(scenario.slots, scenario.token_time, scenario.lengths, scenario.flip_time)
        self.reward = SimulatedReward(scenario.reward_delay, scenario.unscorable)
        self.reference = None if scenario.reference is None else SimulatedReference(scenario.reference, self.generation)
        hosts: list[Host] = [self.generation, *([self.reference] if self.reference else [])]
        self.critic = None if scenario.critic is None else SimulatedCritic(scenario.critic, scenario.cost.fixed, hosts)
        hosts += [self.critic] if self.critic else []
        self.cost: SimulatedReward | None = None
        self.cost_critic: SimulatedCritic | None = None
        if scenario.constrained:
            self.cost, self.cost_critic = self._constraint(hosts)
            hosts.append(self.cost_critic)
        limit = None if scenario.policy == "admit" else scenario.limit
        self.training = SimulatedTraining(scenario.cost, limit, hosts, scenario.seed)
        self.page, self.estimate = _algorithm(scenario)
        self._take_up(plan_resume(store))
        self.invariants = Invariants(self.gate, self.journal, self._check_training, thorough=scenario.thorough)
        self.recorder = Recorder(self.result)
        self.controller = self._controller()
        self.controller.worker_lives("generation", self.generation.instance)

    def _constraint(self, hosts: list[Host]) -> tuple[SimulatedReward, SimulatedCritic]:
        scenario = self.scenario
        assert scenario.critic is not None, "costs are judged beside rewards"
        critic = SimulatedCritic(scenario.critic, scenario.cost.fixed, hosts, "cost")
        return SimulatedReward(scenario.reward_delay, scenario.unscorable), critic

    def _take_up(self, plan: ResumePlan | None) -> None:
        config = self.scenario.gate
        if plan is None:
            self.journal, self.gate, self._committed = Journal(self.store), self.scenario.gate_class(config), -1
            return
        self.journal = resume(self.store, plan)
        self.gate = self.scenario.gate_class(config, plan.version, plan.next_group)
        self._committed = plan.version
        for group in plan.groups:
            self.gate.restore(group)
        self.training.take_up(plan.epoch, plan.version, bytes.fromhex(plan.chain))
        for critic in filter(None, (self.critic, self.cost_critic)):
            critic.take_up(plan.epoch, plan.version)

    def _controller(self) -> Controller:
        return Controller(
            self.gate,
            self.journal,
            Fleet(
                self.generation,
                self.reward,
                self.training,
                self.reference,
                critic=self.critic,
                cost=self.cost,
                cost_critic=self.cost_critic,
            ),
            prompts=lambda group: (f"prompt {group}", {}),
            sampling=Sampling(1.0, 1 << 30, self.scenario.deadline, self.scenario.seed, self.training.epoch),
            advantages=self.estimate,
            schedule=Schedule(self.scenario.steps, self.scenario.finish),
            between=self._between,
            observe=self._observe,
        )

    async def _between(self, version: int) -> None:
        if self._committed < 0 or version - self._committed >= self.scenario.checkpoint_every:
            await self._commit(version)

    async def _commit(self, version: int) -> None:
        await commit(self.journal, lambda place: self.training.checkpoint(place, self.training.epoch, version), keep=2)
        self._committed = version

    def _observe(self, event: Event) -> None:
        self.recorder.observe(event)
        self.invariants.observe(event)

    async def run(self) -> Result:
        """To the end of the run. Raises what the controller raises, AssertionError, TimeoutError past the deadline."""
        try:
            async with asyncio.timeout(self.scenario.deadline), asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(watch, name="beside") for watch in (self.invariants.watch(), *self._faults())
                ]
                await self.controller.run(self.page)
                for task in beside:
                    task.cancel()
                await self._commit(self.gate.version)
        except BaseExceptionGroup as errors:
            raise first(errors) from None
        self.invariants.check()
        self.result.audit = audit_store(self.store)
        assert self.result.audit.ok, str(self.result.audit)
        self._check_rows()
        return self._finished()

    def _faults(self) -> Iterator[Coroutine[Any, Any, None]]:
        faults, chance = self.scenario.faults, random.Random(f"faults {self.scenario.seed} {self.life}")
        hosts = ((self.generation, faults.generation), (self.reward, faults.reward), (self.reference, faults.reference))
        for host, mean in hosts:
            if host is not None and mean:
                yield self._kill(host, mean, random.Random(chance.random()))
        if faults.row:
            yield self._lose_rows(faults.row, random.Random(chance.random()))
        if faults.controller and self.life < LIVES:
            yield self._die(chance.expovariate(1 / faults.controller))

    async def _kill(self, host: Host, mean: float, chance: random.Random) -> None:
        while True:
            await asyncio.sleep(chance.expovariate(1 / mean))
            instance = host.instance
            running = self.generation.works_for() if host is self.generation else ()
            self.controller.worker_lost(instance, "killed", running)
            host.die()
            await self.training.detached(instance)
            await asyncio.sleep(self.scenario.faults.restart)
            host.come_back()
            self.controller.worker_lives(host.service, host.instance)
            await self.controller.worker_started(host.service)

    async def _die(self, after: float) -> None:
        await asyncio.sleep(after)
        self.store.freeze()  # first, or those who are cancelled write down what no dead process writes
        raise Killed

    async def _lose_rows(self, mean: float, chance: random.Random) -> None:
        while True:
            await asyncio.sleep(chance.expovariate(1 / mean))
            if self.generation.rows:
                del self.generation.rows[chance.choice(list(self.generation.rows))]

    def _check_training(self) -> None:
        training = self.training
        assert len(training.trained) == training.samples_trained, "a sample was trained twice"
        if self.scenario.policy != "admit":
            assert training.oldest <= self.scenario.limit, "a token over the limit is in the loss"

    def _check_rows(self) -> None:
        """Every row that is left belongs to a sample in flight: nothing leaks."""
        for host in (self.generation, self.reference, self.critic, self.cost_critic):
            left, most = 0 if host is None else len(host.rows), self.gate.in_flight + self.gate.awaited
            assert left <= most, f"{left} rows are left of {self.gate.in_flight} samples in flight"

    def _finished(self) -> Result:
        result, training = self.result, self.training
        result.seconds, result.version = asyncio.get_running_loop().time(), self.gate.version
        result.digest = self.recorder.digest(self.journal)
        result.training, result.blocked = training.busy, training.blocked
        result.generating, result.in_loss = self.generation.busy, training.in_loss
        result.live = {
            key: _within(spans, version, self.scenario.limit) for key, (spans, version) in training.trained.items()
        }
        return result


def _algorithm(scenario: Scenario) -> tuple[Page, Advantages]:
    if scenario.critic is not None:
        return safe_rlhf.PAGE if scenario.constrained else ppo.PAGE, Rewards()
    return (remax.PAGE, GreedyBaseline()) if scenario.greedy else (grpo.PAGE, GroupBaseline())


def _within(spans: Spans, version: int, limit: int) -> int:
    return sum(tokens for stamp, tokens in spans if live(stamp, version, limit))


def simulate(scenario: Scenario) -> Result:
    """One run, on a virtual loop of its own; the same scenario gives the same result."""

    async def main() -> Result:
        store, life, chance = MemoryStore(), 0, random.Random(f"deaths {scenario.seed}")
        while True:
            try:
                return await Run(scenario, store, life).run()
            except Killed:
                power = chance.random() < scenario.faults.power
                store, life = store.after_power_cut(tail=b"torn") if power else store.after_death(), life + 1

    return virtual.run(main())
