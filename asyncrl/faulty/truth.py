"""What really happened in the faulty world, told by those who did it and not by the messages about it."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from asyncrl.protocols.batch import BatchRef, Place
from asyncrl.rows import RowStore
from asyncrl.weights.session import slot_of

Key = tuple[int, int]


class Truth:
    """limit: how old a token in the loss may be; None: any.

    rows, places: of every worker that lives, and the last places it wrote. reading: version of the weights that each
    living reader reads in place.
    steps: the samples that led to each version of the surviving history. problem: the first thing that was wrong; a
    worker that raised it would only be restarted.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.rows: dict[str, RowStore] = {}
        self.places: dict[str, deque[Place]] = {}
        self.reading: dict[str, int] = {}
        self.steps: dict[int, tuple[Key, ...]] = {}
        self.problem = ""
        self._stuck = 0.0
        self._tickets: set[int] = set()

    def taken_up(self, version: int) -> None:
        """A run goes on from here; what was trained beyond is void, and no worker lives."""
        self.steps = {made: keys for made, keys in self.steps.items() if made <= version}
        self.rows.clear()
        self.reading.clear()

    def ended(self, instance: str) -> None:
        """This worker is dead."""
        self.rows.pop(instance, None)
        self.reading.pop(instance, None)

    def keeps(self, instance: str, rows: RowStore) -> None:
        """It has a store of rows."""
        self.rows[instance] = rows

    def counted(self, ticket: int) -> None:
        """An endpoint that may not be repeated was called with this."""
        if ticket in self._tickets:
            self.wrong(f"ticket {ticket} was counted twice: a call that may not be repeated was repeated")
        self._tickets.add(ticket)

    def wrong(self, problem: str) -> None:
        self.problem = self.problem or problem

    def reads(self, instance: str, version: int) -> None:
        """From now on it reads these weights, where they lie."""
        self.reading[instance] = version

    def lose_row(self, service: str) -> None:
        """One that a worker of this service holds is freed under whoever wants to read it."""
        for instance, rows in self.rows.items():
            if instance.startswith(service) and (places := self.places.get(instance)):
                rows.free([places.pop()])
                return

    def put(self, instance: str, place: Place) -> None:
        """A row that lies there now."""
        self.places.setdefault(instance, deque(maxlen=8)).append(place)

    def get_stuck(self, seconds: float) -> None:
        """The next reader to be handed weights does not answer for so long."""
        self._stuck = seconds

    def stuck(self) -> float:
        seconds, self._stuck = self._stuck, 0.0
        return seconds

    def trained(self, version: int, batch: BatchRef, stamps: Sequence[Any]) -> None:
        """A step from `version`. stamps: of the tokens in the loss, of each sample."""
        before = {key for keys in self.steps.values() for key in keys}
        twice = [row.key for row in batch if row.key in before]
        if twice:
            self.wrong(f"{twice} were trained twice")
        if version + 1 in self.steps:
            self.wrong(f"version {version + 1} was made twice")
        self.steps[version + 1] = tuple(row.key for row in batch)
        ages = [version - int(of_row.min()) for of_row in stamps if len(of_row)]
        if self._limit is not None and max(ages) > self._limit:
            self.wrong(f"a token {max(ages)} versions old is in the loss; the limit is {self._limit}")
        for reader, reading in self.reading.items():
            if slot_of(reading) == slot_of(version + 1):
                self.wrong(f"{reader} reads version {reading}, which version {version + 1} overwrites")
