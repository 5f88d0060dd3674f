"""The parts that simulators share: the sizes of a run, a controller that resumes its newest checkpoint, and what must
hold at every event."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from asyncrl.algorithms import grpo, ppo, remax, safe_rlhf
from asyncrl.concurrency import running_beside
from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import (
    Config,
    GenerationConfig,
    ModelConfig,
    StalenessConfig,
    TaskConfig,
    TrainingConfig,
)
from asyncrl.controller.checkpointing import BackgroundCommits, save_rows
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import IN_FLIGHT, Stage
from asyncrl.controller.journal.checkpoints import NOTHING_SAVED, plan_resume, resume
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.ledger import Drawn
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.observers.events import Event, StepDone, StepLost
from asyncrl.fleet.fleet import Fleet
from asyncrl.objectives.advantages import Advantages, greedy_baseline, group_baseline, plain_rewards
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import Checkpointed
from asyncrl.protocols.service_contracts import Training
from asyncrl.protocols.staleness import Policy

# Checks what must hold at every event of a run, simulated or not.


@dataclass(slots=True)
class Invariants:
    """Checks staleness, conservation and caps after every step, or after every event if `thorough`.

    check_trainer: checks what the trainer really did, after every step.
    """

    gate: Gate
    journal: Journal
    check_trainer: Callable[[], None]
    thorough: bool
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _lost_in_a_row: int = 0
    _drawn_in_a_row: int = 0

    def observe(self, event: Event) -> None:
        if self.thorough or isinstance(event, StepDone):
            self._changed.set()
        if isinstance(event, StepLost):
            self._lost_in_a_row += 1
            assert self._lost_in_a_row < 100, "100 steps in a row lost their rows"
        if isinstance(event, Drawn):
            self._drawn_in_a_row += 1
            assert self._drawn_in_a_row < 50 * self.gate.config.cap, "groups are drawn on and on, and none is trained"
            assert self.gate.held() <= self.gate.config.credits, f"group {event.group} was drawn without credit"
        if isinstance(event, StepDone):
            self._lost_in_a_row = 0
            self._drawn_in_a_row = 0
            keys = [row.key for row in event.cuts.batch]
            rule = self.gate.rule
            assert all(one < next_ for one, next_ in pairwise(keys)), "a batch is sorted by (group, member), each once"
            self.check_trainer()
            if rule.bounded and not rule.by_token:
                stale = [sample for sample in event.report.samples if sample.masked and sample.reason == "stale"]
                assert not stale, "the gate let a stale token through"

    async def watch(self) -> None:
        """Checks until it is cancelled, each time after all changes of one event are made."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self.check()

    def check(self) -> None:
        """Checks conservation, that gate and journal agree, and caps."""
        gate = self.gate
        ledger = self.journal.ledger
        assert ledger.balanced(), "drawn differs from trained + dropped + in flight"
        assert gate.version == ledger.version, "gate and journal are at different versions"
        in_flight = tuple((group, gate.members(group, *IN_FLIGHT)) for group in gate.groups())
        assert in_flight == ledger.in_flight(), "gate and journal differ in what is in flight"
        waiting = {group: gate.members(group, Stage.READY, Stage.TRAINING) for group in gate.groups()}
        ready = {group: ledger.groups[group].members(Stage.READY) for group in waiting}
        assert waiting == ready, "gate and journal differ in what waits for training"
        known = {group: ledger.groups[group].greedy for group in gate.groups()}
        assert known == {each: gate.group(each).greedy for each in known}, "gate and journal differ in a greedy answer"
        assert gate.in_flight <= gate.config.cap * gate.config.members, "more is in flight than the cap"


@dataclass(frozen=True, slots=True)
class RunShape:
    """Sizes of a simulated run; times are virtual seconds.

    groups, members, limit, policy, slots, cut_at, need_signal, greedy: configure the gate. flip_time: seconds until
    new weights are loaded. unscorable: share of the samples that get no reward. finish, steps: as in the config.
    checkpoint_every: steps between two checkpoints. max_new_tokens: by default more than any distribution of lengths
    gives.
    """

    seed: int = 0
    policy: Policy = "mask"
    groups: int = 2
    members: int = 2
    limit: int = 1
    slots: int = 4
    cut_at: int | None = 2
    steps: int = 3
    flip_time: float = 0.0
    unscorable: float = 0.0
    finish: Literal["abandon", "drain"] = "abandon"
    checkpoint_every: int = 1
    need_signal: bool = False
    greedy: bool = False
    admission: Literal["adaptive", "full", "lockstep"] = "adaptive"
    max_new_tokens: int = 4096
    background_checkpoints: bool = True

    @property
    def all_slots(self) -> int:
        """Slots of all replicas together."""
        return self.slots

    @property
    def gate(self) -> GateConfig:
        cut_at = None if self.admission == "lockstep" else self.cut_at
        sizes = self.groups, self.members, self.limit, self.policy, self.all_slots, cut_at
        return GateConfig(*sizes, 1 if self.greedy else 2, self.need_signal, self.greedy, self.admission)

    @property
    def enforced_limit(self) -> int | None:
        """Returns the limit that the trainer enforces; None admits every token."""
        return self.limit if self.gate.rule.bounded else None


class ResumableRun:
    """Gate, journal and controller of a run from its beginning, or from the newest checkpoint in `store`.

    restored: samples that go on as they were at that checkpoint. answered: episodes that go on after a turn.
    check_trainer, thorough: see Invariants.
    """

    training: Training
    controller: Controller

    def __init__(
        self,
        shape: RunShape,
        store: MemoryStore,
        check_trainer: Callable[[], None],
        *,
        thorough: bool = True,
        gate_class: type[Gate] = Gate,
    ) -> None:
        self._shape = shape
        self._store = store
        self._check_trainer = check_trainer
        self._thorough = thorough
        self._gate_class = gate_class
        self.take_up()

    def take_up(self) -> None:
        """Begins, or goes on from the newest checkpoint; a controller that was made before has ended."""
        shape = self._shape
        store = self._store
        gate_class = self._gate_class
        self.plan = plan = plan_resume(store)
        self.incarnation = plan.incarnation if plan else 0
        saved = plan.restorable(whole_groups=False) if plan else NOTHING_SAVED
        self.restored = saved.waiting
        self.answered = saved.answered
        self.journal = resume(store, plan, self.restored) if plan else Journal(store)
        self.gate = gate_class(shape.gate, plan.version, plan.ledger.next_group) if plan else gate_class(shape.gate)
        for group in self.journal.ledger.groups.values():
            self.gate.restore(group)
        for number, members in self.restored:
            waiting = self.gate.members(number, Stage.READY)
            assert set(members) <= set(waiting), f"of group {number} {members} were restored, and {waiting} wait"
        self.committed = plan.version if plan else -1
        self.commits = BackgroundCommits(
            self.journal, TrainingConfig(background_checkpoints=shape.background_checkpoints)
        )
        self.invariants = Invariants(self.gate, self.journal, self._check_trainer, thorough=self._thorough)

    def make_controller(
        self,
        fleet: Fleet,
        deadline: float,
        observe: Callable[[Event], None],
        kill: Callable[[str], None] = lambda instance: None,
    ) -> None:
        """Makes the controller. deadline: of a sample, in seconds. kill: kills a reader that holds on to weights."""
        shape = self._shape
        self._algorithm, advantages = _algorithm(fleet, shape.greedy)
        self.training = fleet.training
        self.controller = Controller(
            self.gate,
            self.journal,
            fleet,
            prompts=lambda group: (f"prompt {group}", {}),
            config=Config(
                seed=shape.seed,
                steps=shape.steps,
                finish=shape.finish,
                model=ModelConfig(name="none"),
                task=TaskConfig(prompts="none"),
                staleness=StalenessConfig(limit=shape.limit, admission=shape.admission),
                generation=GenerationConfig(max_new_tokens=shape.max_new_tokens, deadline=deadline),
            ),
            advantages=advantages,
            between=self._between,
            observe=observe,
            kill=kill,
            checkpoint=self.plan.directory if self.plan else "",
            answered=self.answered,
        )

    async def run_controller(self, watches: Mapping[str, Coroutine[Any, Any, None]]) -> None:
        """Runs the controller to its last step, commits that, and ends the watches, which run beside it.

        Raises the first error of the controller or of a watch, and AssertionError when an invariant does not hold.
        """
        async with running_beside(watches), self.commits:
            await self.controller.run(self._algorithm)
            self.check_end()
            if self.gate.version > self.committed:
                await self.commit(self.gate.version)
        self.invariants.check()

    def check_end(self) -> None:
        """Checks what holds when the controller has ended; faults go on until the last checkpoint is written."""
        self.invariants.check()

    async def _between(self, version: int) -> None:
        self.commits.check()
        if self.committed < 0 or version - self.committed >= self._shape.checkpoint_every:
            await self.commit(version)

    def rows_to_save(self) -> BatchRef:
        """Returns the samples whose rows a checkpoint saves."""
        return self.controller.rows_to_save()

    async def commit(self, version: int) -> None:
        samples = self.rows_to_save()

        async def copy(directory: str) -> Checkpointed:
            saved = await save_rows(self.training, samples, directory)
            await self.training.copy_state(self.incarnation, version)
            return saved

        async def write(directory: str) -> Checkpointed:
            return await self.training.checkpoint(directory, self.incarnation, version)

        self.committed = version
        await self.commits.begin(version, copy, write)


def _algorithm(fleet: Fleet, greedy: bool) -> tuple[Algorithm, Advantages]:
    if fleet.critic is not None:
        return ppo.ALGORITHM if fleet.cost_critic is None else safe_rlhf.ALGORITHM, plain_rewards
    return (remax.ALGORITHM, greedy_baseline) if greedy else (grpo.ALGORITHM, group_baseline)
