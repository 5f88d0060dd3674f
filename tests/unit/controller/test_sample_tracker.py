"""The sample tracker releases rows as soon as they are no longer needed."""

from dataclasses import replace

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.protocols.batch import Place, RowRef, SampleName
from asyncrl.protocols.hash_chain import GENESIS, chain
from asyncrl.protocols.messages import Score

CONFIG = GateConfig(groups=1, members=4, limit=2, policy="mask", slots=8, cut_at=2)


def row(group: int, member: int) -> RowRef:
    place = Place("shm://generation0.0-0-1.rows", 4 * group + member, 1, ("text",))
    return RowRef(group, member, 0, 0, 1, 1, 0, 0, "stop", (place,))


def test_trained_rows_are_released_while_a_straggler_of_their_group_runs() -> None:
    """A full batch of parts of groups: what is in the loss needs no slot, however long the stragglers take."""
    released: list[SampleName] = []
    gate, journal = Gate(CONFIG), Journal(MemoryStore())
    tracker = SampleTracker(gate, journal, lambda event: None, released.extend, lambda: None)
    groups = [tracker.draw(), tracker.draw()]
    for group in groups:
        for member in (0, 1):
            tracker.generated([row(group, member)])
            tracker.scored(row(group, member), Score(float(member), {}))

    cuts = tracker.pick()
    assert cuts == ((0, (0, 1)), (1, (0, 1)))
    keys = [(group, member, 0) for group, members in cuts for member in members]
    tracker.trained(cuts, 1, (0.0,) * 4, chain(GENESIS, keys).hex())

    assert sorted(released) == keys
    assert gate.groups() == (0, 1), "their stragglers still run"
    assert not tracker.groups_at("generation0.0-0-1"), "a death there costs what was trained nothing"


def test_what_a_worker_may_have_made_unheard_is_released_too() -> None:
    """An answer that crosses the end of its call is known to nobody here; that of the next attempt is not touched."""
    released: list[SampleName] = []
    tracker = SampleTracker(Gate(CONFIG), Journal(MemoryStore()), lambda event: None, released.extend, lambda: None)
    group = tracker.draw()
    tracker.restart(group, "its worker died")
    assert released == [(group, member, 0) for member in range(4)]
    released.clear()

    tracker.generated([row(group, 0), replace(row(group, 1), attempt=1)])
    assert released == [(group, 0, 0)], "a late answer"
    tracker.generated([replace(row(group, 1), attempt=1)])
    assert released == [(group, 0, 0)], "a repeated answer is the row that waits for training"
    released.clear()

    tracker.drop(group, (2, 3), "stale")
    assert released == [(group, 2, 1), (group, 3, 1)]
