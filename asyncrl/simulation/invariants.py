"""Checks what must hold at every event of a run, simulated or not."""

import asyncio
from collections.abc import Callable
from itertools import pairwise

from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import IN_FLIGHT
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.observers.events import Event, GroupDrawn, StepDone, StepLost


class Invariants:
    """Checks staleness, conservation and caps after every step, or after every event if `thorough`.

    check_trainer: checks what the trainer really did, after every step.
    """

    def __init__(self, gate: Gate, journal: Journal, check_trainer: Callable[[], None], *, thorough: bool) -> None:
        self._gate = gate
        self._journal = journal
        self._check_trainer = check_trainer
        self._thorough = thorough
        self._changed = asyncio.Event()
        self._lost_in_a_row = 0
        self._drawn_in_a_row = 0

    def observe(self, event: Event) -> None:
        if self._thorough or isinstance(event, StepDone):
            self._changed.set()
        if isinstance(event, StepLost):
            self._lost_in_a_row += 1
            assert self._lost_in_a_row < 100, "100 steps in a row lost their rows"
        if isinstance(event, GroupDrawn):
            self._drawn_in_a_row += 1
            assert self._drawn_in_a_row < 50 * self._gate.config.cap, "groups are drawn on and on, and none is trained"
            assert self._gate.held() <= self._gate.config.credits, f"group {event.group} was drawn without credit"
        if isinstance(event, StepDone):
            self._check_step(event)

    async def watch(self) -> None:
        """Checks until it is cancelled, each time after all changes of one event are made."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self.check()

    def check(self) -> None:
        """Checks conservation, that gate and journal agree, and caps."""
        gate, ledger = self._gate, self._journal.ledger
        assert ledger.balanced(), "drawn differs from trained + dropped + in flight"
        assert gate.version == ledger.version, "gate and journal are at different versions"
        in_flight = tuple((group, gate.members(group, *IN_FLIGHT)) for group in gate.groups())
        assert in_flight == ledger.in_flight(), "gate and journal differ in what is in flight"
        known = {group: ledger.groups[group].greedy for group in gate.groups()}
        assert known == {each: gate.group(each).greedy for each in known}, "gate and journal differ in a greedy answer"
        assert gate.in_flight <= gate.config.cap * gate.config.members, "more is in flight than the cap"

    def _check_step(self, event: StepDone) -> None:
        self._lost_in_a_row = 0
        self._drawn_in_a_row = 0
        keys, policy = [row.key for row in event.cuts.batch], self._gate.config.policy
        assert all(one < next_ for one, next_ in pairwise(keys)), "a batch is sorted by (group, member), each once"
        self._check_trainer()
        if policy in ("drop", "block"):
            assert not any(sample.masked for sample in event.report.samples), "the gate let a stale token through"
