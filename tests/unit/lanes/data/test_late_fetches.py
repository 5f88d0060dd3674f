"""A fetch that is late or whose connection breaks is made again on another connection, on virtual time."""

import asyncio

import numpy as np
import pytest

from asyncrl.errors import ALL_SLOTS, LostRows
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.lanes.data.row_reader import FETCH_DEADLINE, RowReader, serve_rows
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import Batch, BatchRef, RowRef
from asyncrl.protocols.messages import PROTOCOL, Call, Hello
from asyncrl.simulation import virtual_loop

ROWS = 100


def hello(instance: str) -> Hello:
    return Hello("aa", 1, "generation", 0, instance, PROTOCOL, "0.1")


class Owner:
    """Serves rows; the first `hung` fetches are never answered. fetches: how many came. links: connections that they
    came on. break_links: whether the connection of such a fetch breaks instead."""

    def __init__(self, wire: InprocWire, hung: int, break_links: bool) -> None:
        self.listener = wire.listen("inproc://a")
        self.store = RowStore.private("inproc://a#a", ROWS, 64)
        self.fetches = 0
        self.links = set[object]()
        self._answer = serve_rows(self.store)
        self._hung = hung
        self._break_links = break_links
        self.server = Server(self.listener, self.dispatch, hello("a"))

    async def dispatch(self, call: Call) -> Batch:
        self.fetches += 1
        self.links |= set(self.server._sessions)
        if self.fetches <= self._hung:
            if self._break_links:
                for peer in list(self.server._sessions):
                    self.listener.cut(peer)
            await asyncio.Event().wait()
        found: Batch = await self._answer(call)  # type: ignore[misc]
        return found


def read_with(
    hung: int, *, break_links: bool = False, free: int | None = None, given_up: float | None = None
) -> tuple[Owner, Batch, float]:
    """Reads all rows of an owner that hangs so often, one of them freed; returns it, the rows, and the seconds.
    given_up: when the reader learns that the owner is gone."""

    async def main() -> tuple[Owner, Batch, float]:
        wire = InprocWire()
        owner = Owner(wire, hung, break_links)
        places = [owner.store.put({"tokens": np.full(2, number, np.int32)}) for number in range(ROWS)]
        rows = [RowRef(number, 0, 0, 1, 3, 2, 0, 0, "stop", (place,)) for number, place in enumerate(places)]
        if free is not None:
            owner.store.free([places[free]])
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(owner.server.serve())
            try:
                async with RowReader(wire, hello("reader")) as reader:
                    if given_up is not None:
                        asyncio.get_running_loop().call_at(given_up, reader.give_up, "a")
                    batch = await reader.read(BatchRef(tuple(rows)), ["tokens"])
            finally:
                serving.cancel()
                owner.store.close()
        return owner, batch, asyncio.get_running_loop().time()

    return virtual_loop.run(main())


@pytest.mark.parametrize(("hung", "break_links"), [(0, False), (1, False), (4, False), (1, True)])
def test_rows_that_come_late_are_fetched_again(hung: int, break_links: bool) -> None:
    """A hundred rows are four chunks; where one of them is late, all on its connection are asked for again."""
    owner, batch, seconds = read_with(hung, break_links=break_links)
    assert [int(tokens[0]) for tokens in batch["tokens"]] == list(range(ROWS))
    assert seconds == pytest.approx(FETCH_DEADLINE if hung and not break_links else 0.0, abs=1.0)
    assert owner.fetches >= 4 + hung
    assert len(owner.links) == (2 if hung else 1)


def lost_in(hung: int, free: int | None = None, given_up: float | None = None) -> LostRows:
    with pytest.raises(ExceptionGroup) as caught:
        read_with(hung, free=free, given_up=given_up)
    (error,) = caught.value.exceptions
    assert isinstance(error, LostRows)
    return error


def test_an_owner_that_is_late_on_two_connections_has_lost_its_rows() -> None:
    error = lost_in(1000)
    assert error.places == (("inproc://a#a", ALL_SLOTS),)
    assert f"did not answer fetch_rows within {FETCH_DEADLINE:g} s" in str(error)


def test_a_row_that_was_freed_is_named_over_the_wire() -> None:
    error = lost_in(0, free=57)
    assert error.places == (("inproc://a#a", 57),)


@pytest.mark.parametrize("given_up", [0.0, 3.0])
def test_rows_of_an_owner_that_is_known_to_be_gone_are_lost_at_once(given_up: float) -> None:
    error = lost_in(1000, given_up=given_up)
    assert error.places == (("inproc://a#a", ALL_SLOTS),)
    assert "a is gone" in str(error), "and no deadline passed"
