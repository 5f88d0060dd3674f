"""Journals of plausible runs, made without gate or controller."""

import random
from collections.abc import Callable
from hashlib import sha256

import pytest

from asyncrl.controller.journal.ledger import (
    AttemptStarted,
    Drawn,
    Dropped,
    Generated,
    InFlight,
    Ledger,
    Record,
    Scored,
    Trained,
)
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.protocols.hash_chain import GENESIS, chain
from asyncrl.protocols.messages import Checkpointed

Key = tuple[int, int]


class Run:
    """Takes random legal steps, as controller and trainer; keeps its own account of every sample.

    records: what was journaled; stages: of each sample "running", "scoring", "ready", "trained" or "dropped".
    """

    def __init__(self, seed: int, members: int = 3) -> None:
        self.rng = random.Random(seed)
        self.members = members
        self.records: list[Record] = []
        self.stages: dict[Key, str] = {}
        self.attempts: dict[Key, int] = {}
        self.newest: dict[int, int] = {}
        self.version = 0
        self.chain = GENESIS

    def go(self, steps: int) -> "Run":
        for _ in range(steps):
            self.step()
        return self

    def step(self) -> Record:
        moves = [self.draw, self.generate, self.generate, self.score, self.score, self.train, self.drop, self.restart]
        record = self.rng.choice(moves)() or self.draw()
        self.records.append(record)
        return record

    def at(self, *stages: str) -> list[Key]:
        return [key for key, stage in self.stages.items() if stage in stages]

    def any_at(self, *stages: str) -> Key | None:
        keys = self.at(*stages)
        return self.rng.choice(keys) if keys else None

    def draw(self) -> Record:
        group = len(self.newest)
        self.newest[group] = 0
        for member in range(self.members):
            self.stages[group, member] = "running"
            self.attempts[group, member] = 0
        return Drawn(group, self.version, self.members)

    def generate(self) -> Record | None:
        key = self.any_at("running")
        if key is None:
            return None
        self.stages[key] = "scoring"
        return Generated(key[0], self.attempts[key], ((key[1], self.version, self.version, 5),))

    def score(self) -> Record | None:
        key = self.any_at("scoring")
        if key is None:
            return None
        self.stages[key] = "ready"
        return Scored(*key, self.rng.random())

    def train(self) -> Record | None:
        keys = sorted(self.at("ready"))
        if len(keys) < self.members:
            return None
        self.version += 1
        self.chain = chain(self.chain, [(*key, self.attempts[key]) for key in keys])
        for key in keys:
            self.stages[key] = "trained"
        return Trained(self.version, grouped(keys), (0.5,) * len(keys), self.chain.hex())

    def drop(self) -> Record | None:
        key = self.any_at("running", "scoring", "ready") if self.rng.random() < 0.3 else None
        if key is None:
            return None
        self.stages[key] = "dropped"
        return Dropped(key[0], (key[1],), self.rng.choice(["stale", "poison"]))

    def restart(self) -> Record | None:
        key = self.any_at("running", "scoring", "ready") if self.rng.random() < 0.3 else None
        if key is None:
            return None
        self.newest[key[0]] += 1
        self.stages[key], self.attempts[key] = "running", self.newest[key[0]]
        return AttemptStarted(key[0], self.newest[key[0]], (key[1],), "peer lost")

    def in_flight(self) -> InFlight:
        return InFlight(grouped(sorted(self.at("running", "scoring", "ready"))))


def grouped(keys: list[Key]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    groups: dict[int, list[int]] = {}
    for group, member in keys:
        groups.setdefault(group, []).append(member)
    return tuple((group, tuple(members)) for group, members in groups.items())


class Trainer:
    """Writes one file, whose content is its version, and answers with the chain it is told to have."""

    def __init__(self, store: MemoryStore, ledger: Callable[[], Ledger]) -> None:
        self.store = store
        self.ledger = ledger

    async def write(self, directory: str) -> Checkpointed:
        version = self.ledger().version
        data = f"weights {self.ledger().version}".encode()
        self.store.put(directory, "model.bin", data)
        return Checkpointed(version, self.ledger().chain.hex(), {"model.bin": sha256(data).hexdigest()})


@pytest.fixture(scope="session")
def run() -> type[Run]:
    return Run


@pytest.fixture(scope="session")
def trainer() -> type[Trainer]:
    return Trainer
