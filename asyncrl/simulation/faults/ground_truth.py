"""Records what really happened in a trial: the services report what they did, whatever their messages said."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.lanes.weights.leases import slot_of
from asyncrl.protocols.batch import BatchRef
from asyncrl.simulation.fakes.fake_service import FakeService

Key = tuple[int, int]


class TrialViolation(AssertionError):
    """Ends a trial in which something happened that must never happen; the message says what."""


@dataclass(slots=True)
class GroundTruth:
    """Notices what must never happen. limit: how many versions old a token in the loss may be; None admits any.

    services: what each living worker runs. reading: version of the weights that each living reader reads in place.
    steps: the samples that led to each version of the surviving history. stuck_seconds: how late the next reader that
    is offered weights answers. violation: the first thing that was wrong, "" if nothing was; an error raised in a
    worker would only restart it.
    """

    limit: int | None
    chance: random.Random
    services: dict[str, FakeService] = field(default_factory=dict)
    reading: dict[str, int] = field(default_factory=dict)
    steps: dict[int, tuple[Key, ...]] = field(default_factory=dict)
    tickets: set[int] = field(default_factory=set)
    violation: str = ""
    stuck_seconds: float = 0.0

    def resumed(self, version: int) -> None:
        """A run goes on from this version: later steps are void, and no worker lives yet."""
        self.steps = {made: keys for made, keys in self.steps.items() if made <= version}
        self.services.clear()
        self.reading.clear()

    def ended(self, instance: str) -> None:
        self.services.pop(instance, None)
        self.reading.pop(instance, None)

    def counted(self, ticket: int) -> None:
        """Counts a call of an endpoint that must not be repeated."""
        if ticket in self.tickets:
            self.report(f"ticket {ticket} was counted twice: a call that must not be repeated was repeated")
        self.tickets.add(ticket)

    def report(self, violation: str) -> None:
        self.violation = self.violation or violation

    def lose_row(self, service: str) -> None:
        """Frees a row of a worker of this service, whoever still needs it."""
        for instance, worker in self.services.items():
            if instance.startswith(service) and worker.stored_rows:
                return worker.lose_row(self.chance)

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
        if self.limit is not None and max(ages) > self.limit:
            self.report(f"a token {max(ages)} versions old is in the loss; the limit is {self.limit}")
        for reader, reading in self.reading.items():
            if slot_of(reading) == slot_of(version + 1):
                self.report(f"version {version + 1} overwrites version {reading}, which {reader} reads")
