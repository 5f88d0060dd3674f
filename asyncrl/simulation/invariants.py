"""Checks what must hold at every event of a run, simulated or not."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import IN_FLIGHT, Stage
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.ledger import Drawn
from asyncrl.controller.observers.events import Event, StepDone, StepLost


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
            policy = self.gate.config.policy
            assert all(one < next_ for one, next_ in pairwise(keys)), "a batch is sorted by (group, member), each once"
            self.check_trainer()
            if policy in ("drop", "block"):
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
