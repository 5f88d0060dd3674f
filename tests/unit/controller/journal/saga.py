"""Journals of plausible runs, made without gate or controller; and such a run over a store, with checkpoints."""

import random
from collections.abc import Callable
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from typing import Any

from asyncrl.controller.journal.checkpoints import ResumePlan, plan_resume
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.ledger import (
    AttemptStarted,
    Drawn,
    Dropped,
    Generated,
    InFlight,
    Record,
    Scored,
    Trained,
)
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.protocols.hash_chain import GENESIS, chain
from asyncrl.protocols.messages import Checkpointed
from tests.commit_faults import faulty_commit

Key = tuple[int, int]
IN_FLIGHT = ("running", "scoring", "ready")


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

    def take(self, stage: str, *before: str, chance: float = 1.0) -> Key | None:
        """Moves one sample on, if there is one."""
        keys = self.at(*before) if chance == 1.0 or self.rng.random() < chance else []
        if not keys:
            return None
        key = self.rng.choice(keys)
        self.stages[key] = stage
        return key

    def draw(self) -> Record:
        group = len(self.newest)
        self.newest[group] = 0
        for member in range(self.members):
            self.stages[group, member] = "running"
            self.attempts[group, member] = 0
        return Drawn(group, self.version, self.members)

    def generate(self) -> Record | None:
        key = self.take("scoring", "running")
        return key and Generated(key[0], self.attempts[key], ((key[1], self.version, self.version, 5),))

    def score(self) -> Record | None:
        key = self.take("ready", "scoring")
        return key and Scored(*key, self.rng.random())

    def train(self) -> Record | None:
        keys = sorted(self.at("ready"))
        if len(keys) < self.members:
            return None
        self.version += 1
        self.chain = chain(self.chain, [(*key, self.attempts[key]) for key in keys])
        self.stages |= dict.fromkeys(keys, "trained")
        return Trained(self.version, grouped(keys), (0.5,) * len(keys), self.chain.hex())

    def drop(self) -> Record | None:
        key = self.take("dropped", *IN_FLIGHT, chance=0.3)
        return key and Dropped(key[0], (key[1],), self.rng.choice(["stale", "poison"]))

    def restart(self) -> Record | None:
        key = self.take("running", *IN_FLIGHT, chance=0.3)
        if key is None:
            return None
        self.attempts[key] = self.newest[key[0]] = self.newest[key[0]] + 1
        return AttemptStarted(key[0], self.attempts[key], (key[1],), "peer lost")

    def in_flight(self) -> InFlight:
        return InFlight(grouped(sorted(self.at(*IN_FLIGHT))))


def grouped(keys: list[Key]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((group, tuple(member for _, member in each)) for group, each in groupby(keys, itemgetter(0)))


class Saga:
    """A run over a store. Its trainer writes one file, whose content is its version."""

    def __init__(self, seed: int = 0, store: Any = None) -> None:
        self.store = MemoryStore() if store is None else store
        self.history = Run(seed)
        self.journal = Journal(self.store)

    async def write(self, directory: str) -> Checkpointed:
        data = f"weights {self.journal.ledger.version}".encode()
        self.store.put(directory, "model.bin", data)
        return self.answer({"model.bin": sha256(data).hexdigest()})

    def answer(self, files: dict[str, str]) -> Checkpointed:
        return Checkpointed(self.journal.ledger.version, self.journal.ledger.chain.hex(), files)

    async def checkpoint(self, keep: int = 2, fault: Callable[[str], None] = lambda point: None) -> None:
        await faulty_commit(self.journal, self.write, keep, fault)

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.journal.append(self.history.step())

    def train(self, iterations: int = 1) -> None:
        target = self.history.version + iterations
        while self.history.version < target:
            self.go(1)

    async def with_checkpoints(self, count: int, keep: int = 2) -> "Saga":
        await self.checkpoint(keep)
        for _ in range(count):
            self.train()
            await self.checkpoint(keep)
        return self


def planned(store: Any) -> ResumePlan:
    plan = plan_resume(store)
    assert plan is not None
    return plan
