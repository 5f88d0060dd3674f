"""Books: which rows are released when."""

from dataclasses import replace

from asyncrl.books import Books
from asyncrl.ledger import Journal
from asyncrl.protocols.batch import Place, RowRef, SampleName
from asyncrl.protocols.chain import GENESIS, chain
from asyncrl.protocols.messages import Score
from asyncrl.staleness import Gate, GateConfig
from asyncrl.store import MemoryStore

CONFIG = GateConfig(groups=1, members=4, limit=2, policy="mask", slots=8, cut_at=2)


def row(group: int, member: int) -> RowRef:
    place = Place("shm://generation0.0-0-1.rows", 4 * group + member, 1, ("text",))
    return RowRef(group, member, 0, 0, 1, 1, 0, 0, "stop", (place,))


def test_trained_rows_are_released_while_a_straggler_of_their_group_runs() -> None:
    """A full batch of parts of groups: what is in the loss needs no slot, however long the stragglers take."""
    released: list[SampleName] = []
    gate, journal = Gate(CONFIG), Journal(MemoryStore())
    books = Books(gate, journal, lambda event: None, released.extend, lambda: None)
    groups = [books.draw(), books.draw()]
    for group in groups:
        for member in (0, 1):
            books.generated([row(group, member)])
            books.scored(row(group, member), Score(float(member), {}))

    cuts = books.pick()
    assert cuts == ((0, (0, 1)), (1, (0, 1)))
    keys = [(group, member, 0) for group, members in cuts for member in members]
    books.trained(cuts, 1, (0.0,) * 4, chain(GENESIS, keys).hex())

    assert sorted(released) == keys
    assert gate.groups() == (0, 1), "their stragglers still run"
    assert not books.groups_at("generation0.0-0-1"), "a death there costs what was trained nothing"


def test_what_a_worker_may_have_made_unheard_is_released_too() -> None:
    """An answer that crosses the end of its call is known to nobody here; that of the next attempt is not touched."""
    released: list[SampleName] = []
    books = Books(Gate(CONFIG), Journal(MemoryStore()), lambda event: None, released.extend, lambda: None)
    group = books.draw()
    books.restart(group, "its worker died", 1)
    assert released == [(group, member, 0) for member in range(4)]
    released.clear()

    books.generated([row(group, 0), replace(row(group, 1), attempt=1)])
    assert released == [(group, 0, 0)], "a late answer"
    books.generated([replace(row(group, 1), attempt=1)])
    assert released == [(group, 0, 0)], "a repeated answer is the row that waits for training"
    released.clear()

    books.drop(group, (2, 3), "stale")
    assert released == [(group, 2, 1), (group, 3, 1)]
