"""The way of samples through gate, journal and tracker, with a given number in flight; nothing else runs."""

import gc
import time
import tracemalloc
from collections import deque
from collections.abc import Callable

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal.audit import Audit
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.lanes.data.row_retention import RowRetention
from asyncrl.protocols.batch import Place, RowRef
from asyncrl.protocols.hash_chain import chain
from asyncrl.protocols.messages import Score

GROUPS = 16
MEMBERS = 16
BATCH = GROUPS * MEMBERS
CYCLES = 16
"""Batches that are measured."""


def sample_events(in_flight: int) -> dict[str, float]:
    """Returns CPU-microseconds a sample, by event. in_flight: samples; half of them run, a quarter is ready."""
    pipeline = Pipeline(in_flight // BATCH * GROUPS)
    gc.collect()
    for _ in range(2):
        pipeline.cycle()
    pipeline.seconds.clear()
    for _ in range(CYCLES):
        pipeline.cycle()
    return {event: 1e6 * seconds / (CYCLES * BATCH) for event, seconds in pipeline.seconds.items()}


def _nothing() -> None:
    """Wakes nobody."""


class Pipeline:
    """Groups that move on in the order of their draws, one batch in each cycle."""

    def __init__(self, groups: int) -> None:
        config = GateConfig(GROUPS, MEMBERS, groups // GROUPS - 1, "mask", slots=0, cut_at=MEMBERS // 2)
        self.seconds: dict[str, float] = {}
        self.store = MemoryStore()
        self._journal = Journal(self.store)
        self._gate = Gate(config)
        self._tracker = SampleTracker(
            self._gate, self._journal, lambda event: None, lambda names: None, _nothing, _nothing
        )
        self._running = deque(self._tracker.draw() for _ in range(groups))
        self._scoring: deque[list[RowRef]] = deque()
        self._generated(groups // 2)
        self._scored(groups // 4)

    def cycle(self) -> None:
        self._timed("scored", self._scored)
        self._timed("pick and train", self._train)
        self._timed("draw", self._draw)
        self._timed("generated", self._generated)

    def _timed(self, event: str, act: Callable[[], None]) -> None:
        began = time.process_time()
        act()
        self.seconds[event] = self.seconds.get(event, 0.0) + time.process_time() - began

    def _draw(self) -> None:
        self._running.extend(self._tracker.draw() for _ in range(GROUPS))

    def _generated(self, groups: int = GROUPS) -> None:
        """Takes each sample by itself, as samples of different lengths finish."""
        version = self._gate.version
        for _ in range(groups):
            group = self._running.popleft()
            rows = [row_of(group, member, version) for member in range(MEMBERS)]
            for row in rows:
                self._tracker.generated([row])
            self._scoring.append(rows)

    def _scored(self, groups: int = GROUPS) -> None:
        for _ in range(groups):
            for row in self._scoring.popleft():
                self._tracker.scored(row, Score(float(row.member % 2), {}))

    def _train(self) -> None:
        cuts = self._tracker.pick()
        assert cuts is not None, "a quarter of the samples is ready"
        names = [row.name for cut in cuts for row in self._tracker.rows(*cut)]
        digest = chain(self._journal.ledger.chain, names).hex()
        self._tracker.trained(cuts, self._gate.version + 1, (0.0,) * len(names), digest)


def row_of(
    group: int, member: int, version: int, owner: str = "shm://asyncrl-run-0-generation0.0-0-00000000"
) -> RowRef:
    place = Place(owner, member, 1, ("prompt_ids", "response_ids", "logprobs", "versions", "text"))
    return RowRef(group, member, 0, 0, 100, 100, version, version, "stop", (place,))


def memory(in_flight: int) -> float:
    """Returns the bytes that gate, ledger, tracker and an audit of the journal hold for a sample, with the journal."""
    gc.collect()
    tracemalloc.start()
    try:
        pipeline = Pipeline(in_flight // BATCH * GROUPS)
        audit = Audit(pipeline.store)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert audit.ok, str(audit)
    return held / in_flight


def release_at_owner(in_flight: int) -> float:
    """Returns CPU-microseconds of the owner for each released row, where it stores so many rows."""
    retention = RowRetention()
    groups = in_flight // MEMBERS
    for group in range(groups):
        _store(retention, group)
    began = time.process_time()
    for cycle in range(CYCLES):
        first = cycle * GROUPS
        names = [(group, member, 0) for group in range(first, first + GROUPS) for member in range(MEMBERS)]
        assert len(retention.release(names, first)) == BATCH
        for group in range(groups + first, groups + first + GROUPS):
            _store(retention, group)
    return 1e6 * (time.process_time() - began) / (CYCLES * BATCH)


def _store(retention: RowRetention, group: int) -> None:
    for member in range(MEMBERS):
        retention.add((group, member, 0), Place("owner", member, 1, ()))
