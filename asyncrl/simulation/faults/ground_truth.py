"""Records what really happened in a trial: the services report what they did, whatever their messages said."""

import random
from collections.abc import Sequence
from typing import Any

from asyncrl.lanes.weights.leases import slot_of
from asyncrl.protocols.batch import BatchRef
from asyncrl.simulation.fakes.fake_service import FakeService

Key = tuple[int, int]


class TrialViolation(AssertionError):
    """Ends a trial in which something happened that must never happen; the message says what."""


class GroundTruth:
    """Notices what must never happen. limit: how many versions old a token in the loss may be; None admits any.

    reading: version of the weights that each living reader reads in place. steps: the samples that led to each version
    of the surviving history. stuck_seconds: how late the next reader that is offered weights answers. violation: the
    first thing that was wrong, "" if nothing was; an error raised in a worker would only restart it.
    """

    def __init__(self, limit: int | None, chance: random.Random) -> None:
        self._limit = limit
        self._chance = chance
        self._services: dict[str, FakeService] = {}
        self.reading: dict[str, int] = {}
        self.steps: dict[int, tuple[Key, ...]] = {}
        self.violation = ""
        self.stuck_seconds = 0.0
        self._tickets: set[int] = set()

    def resumed(self, version: int) -> None:
        """A run goes on from this version: later steps are void, and no worker lives yet."""
        self.steps = {made: keys for made, keys in self.steps.items() if made <= version}
        self._services.clear()
        self.reading.clear()

    def started(self, service: FakeService) -> None:
        """A worker runs this service."""
        self._services[service.instance] = service

    def ended(self, instance: str) -> None:
        """A worker is dead."""
        self._services.pop(instance, None)
        self.reading.pop(instance, None)

    def counted(self, ticket: int) -> None:
        """An endpoint that must not be repeated was called with this ticket."""
        if ticket in self._tickets:
            self.report(f"ticket {ticket} was counted twice: a call that must not be repeated was repeated")
        self._tickets.add(ticket)

    def report(self, violation: str) -> None:
        """Records a violation, unless there was one before."""
        self.violation = self.violation or violation

    def lose_row(self, service: str) -> None:
        """Frees a row of a worker of this service, whoever still needs it."""
        for instance, worker in self._services.items():
            if instance.startswith(service) and worker.stored_rows:
                return worker.lose_row(self._chance)

    def take_stuck_seconds(self) -> float:
        """Returns how long this reader is stuck; the next one is not."""
        seconds = self.stuck_seconds
        self.stuck_seconds = 0.0
        return seconds

    def trained(self, version: int, batch: BatchRef, in_loss: Sequence[Any]) -> None:
        """A step trained from this version. in_loss: version stamps of the tokens in the loss, by sample."""
        before = {key for keys in self.steps.values() for key in keys}
        twice = [row.key for row in batch if row.key in before]
        if twice:
            self.report(f"the samples {twice} were trained twice")
        if version + 1 in self.steps:
            self.report(f"version {version + 1} was made twice")
        self.steps[version + 1] = tuple(row.key for row in batch)
        ages = [version - int(stamps.min()) for stamps in in_loss if len(stamps)]
        if self._limit is not None and max(ages) > self._limit:
            self.report(f"a token {max(ages)} versions old is in the loss; the limit is {self._limit}")
        for reader, reading in self.reading.items():
            if slot_of(reading) == slot_of(version + 1):
                self.report(f"version {version + 1} overwrites version {reading}, which {reader} reads")
