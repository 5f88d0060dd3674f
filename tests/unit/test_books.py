"""Books: which rows are released when."""

from asyncrl.books import Books
from asyncrl.ledger import Journal
from asyncrl.protocols.batch import Place, RowRef
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
    released: list[int] = []
    gate, journal = Gate(CONFIG), Journal(MemoryStore())
    books = Books(
        gate, journal, lambda event: None, lambda places: released.extend(p.slot for p in places), lambda: None
    )
    groups = [books.draw(), books.draw()]
    for group in groups:
        for member in (0, 1):
            books.generated([row(group, member)])
            books.scored(row(group, member), Score(float(member), {}))

    cuts = books.pick()
    assert cuts == ((0, (0, 1)), (1, (0, 1)))
    keys = [(group, member, 0) for group, members in cuts for member in members]
    books.trained(cuts, 1, (0.0,) * 4, chain(GENESIS, keys).hex())

    assert sorted(released) == [0, 1, 4, 5]
    assert gate.groups() == (0, 1), "their stragglers still run"
    assert not books.groups_at("generation0.0-0-1"), "a death there costs what was trained nothing"
