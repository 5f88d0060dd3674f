"""The journal of a run with a given number of samples in flight: what a record costs an audit and a resume."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator

from asyncrl.controller.journal.audit import Audit
from asyncrl.controller.journal.checkpoints import commit, plan_resume, resume
from asyncrl.controller.journal.journal import Journal, Scan
from asyncrl.controller.journal.ledger import Drawn, Generated, Record, Scored, Trained
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.protocols.hash_chain import chain
from asyncrl.protocols.messages import Checkpointed

MEMBERS, GROUPS = 8, 32
"""Samples of a group, and groups of a step."""
RECORDS = 40_000
"""Records that are measured, besides the draws of what is in flight."""


def audit_and_resume(in_flight: int) -> dict[str, float]:
    """Returns CPU-microseconds for each record of the journal, with those that the resume itself writes."""
    store = asyncio.run(journaled_run(in_flight // MEMBERS))
    audit, audited = _seconds(lambda: Audit(store)), Scan(store).count
    resumed = _seconds(lambda: _resume(store))
    return {"audit": 1e6 * audit / audited, "resume": 1e6 * resumed / Scan(store).count}


def _resume(store: MemoryStore) -> None:
    plan = plan_resume(store)
    assert plan is not None
    resume(store, plan)


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


async def journaled_run(groups: int) -> MemoryStore:
    """Returns the store of a run that trained RECORDS // 16 groups and made a checkpoint at its end."""
    store = MemoryStore()
    journal = Journal(store)

    async def write(directory: str) -> Checkpointed:
        return Checkpointed(journal.ledger.version, journal.ledger.chain.hex(), {})

    for record in _records(journal, groups):
        journal.append(record)
    await commit(journal, write, 1)
    return store


def _records(journal: Journal, groups: int) -> Iterator[Record]:
    ledger, flying = journal.ledger, deque[int]()
    for _ in range(RECORDS // (2 * MEMBERS * GROUPS)):
        while len(flying) < max(groups, GROUPS):
            flying.append(ledger.next_group)
            yield Drawn(ledger.next_group, ledger.version, MEMBERS)
        batch = [flying.popleft() for _ in range(GROUPS)]
        for group in batch:
            for member in range(MEMBERS):
                yield Generated(group, 0, ((member, ledger.version, ledger.version, 500),))
                yield Scored(group, member, 0.5)
        members = tuple(range(MEMBERS))
        link = chain(ledger.chain, [(group, member, 0) for group in batch for member in members])
        cuts = tuple((group, members) for group in batch)
        yield Trained(ledger.version + 1, cuts, (0.0,) * (MEMBERS * GROUPS), link.hex())
