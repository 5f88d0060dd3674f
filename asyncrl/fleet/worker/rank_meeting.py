"""Tells the ranks of a replica where they meet: where the first of them listens.

controller ── meet("") ──> rank 0 ── listens ──> "tcp://HOST:PORT/NAME"
controller ── meet("tcp://HOST:PORT/NAME") ──> every other rank
"""

import asyncio
import re
import secrets
import socket
from collections.abc import Collection
from dataclasses import dataclass, field

from asyncrl.errors import DeadlineExceeded, Refused
from asyncrl.fleet.worker.lane_access import ControlLane
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.bound_socket import bound_socket, host_of, on_tcp
from asyncrl.lanes.control.wire import Wakeup

MEET = "meet"
"""Call of the controller on the control lane of each rank, which returns the address at which the ranks meet."""

LOOPBACK = "127.0.0.1"
NETWORK = "tcp://"
ADDRESS = re.compile(r"tcp://(\S{1,255}):(\d{1,5})/([0-9a-f]{32})")


class RankMeetings:
    """The controller's end: passes the address of each first rank on to the other ranks of its replica."""

    def __init__(self) -> None:
        self._addresses: dict[tuple[str, int], asyncio.Future[str]] = {}

    async def bring(self, spec: WorkerSpec, control: ControlLane, deadline: float) -> None:
        """Returns when this rank knows where the ranks meet. Raises DeadlineExceeded when the first rank has not
        started after so many seconds, and what the call raises."""
        if spec.layout.size == 1:
            return
        key = (spec.service, spec.replica)
        if spec.rank == 0:
            address = await control.call(MEET, ("",), deadline)
            if key in self._addresses and self._addresses[key].done():
                del self._addresses[key]  # It is that of an earlier instance.
            self._announced(key).set_result(address)
            return
        try:
            async with asyncio.timeout(deadline):
                address = await asyncio.shield(self._announced(key))
        except TimeoutError:
            first = f"rank 0 of {spec.service}{spec.replica}"
            text = f"{first} has not started within {deadline:g} s, and the other ranks meet where it listens"
            raise DeadlineExceeded(text) from None
        await control.call(MEET, (address,), deadline)

    def forget(self, services: Collection[str]) -> None:
        """Forgets where ranks of these services met that are gone, before others are started in their place."""
        self._addresses = {key: place for key, place in self._addresses.items() if key[0] not in services}

    def _announced(self, key: tuple[str, int]) -> asyncio.Future[str]:
        return self._addresses.setdefault(key, asyncio.get_running_loop().create_future())


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """Names a TCP store. name: of the keys of these ranks in it, which nobody else can guess. listener: of the
    rank that serves the store, which takes it over; None at the others. own_host: address of this rank for others."""

    host: str
    port: int
    name: str
    own_host: str
    listener: socket.socket | None = None


@dataclass(eq=False)
class RankMeeting:
    """The end of one rank. own_host: at which the other ranks reach it."""

    own_host: str = LOOPBACK
    _place: MeetingPlace | None = None
    _found: Wakeup = field(default_factory=Wakeup)

    @classmethod
    def at(cls, address: str) -> "RankMeeting":
        """Returns the end of a rank, which other hosts reach where they reach this address of its worker."""
        return cls(host_of(address) if address.startswith(NETWORK) else LOOPBACK)

    def take(self, address: str) -> str:
        """Takes the address at which the ranks meet; "" has this rank listen. Returns the address. Raises Refused for
        what is no such address, and for a second one."""
        if self._place is None:
            self._place = self._placed(address) if address else self._listening()
            self._found.wake()
        place = self._place
        known = f"{on_tcp(place.host, place.port)}/{place.name}"
        if address not in ("", known):
            raise Refused(f"the ranks meet at {known} already, and not at {address!r:.100}")
        return known

    async def place(self, deadline: float) -> MeetingPlace:
        """Returns the place once the controller has told it. Raises DeadlineExceeded after so many seconds."""
        try:
            async with asyncio.timeout(deadline):
                while self._place is None:
                    await self._found.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the controller did not say within {deadline:g} s where the ranks meet: rank 0 did not start"
            ) from None
        return self._place

    def close(self) -> None:
        """Closes a listener that no store took over."""
        if self._place is not None and self._place.listener is not None:
            self._place.listener.close()

    def _listening(self) -> MeetingPlace:
        listener = bound_socket(self.own_host, 0, "the meeting of ranks")
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        return MeetingPlace(self.own_host, port, secrets.token_hex(16), self.own_host, listener)

    def _placed(self, address: str) -> MeetingPlace:
        if (found := ADDRESS.fullmatch(address)) is None:
            raise Refused(f"{address!r:.100} is no address at which ranks meet")
        return MeetingPlace(found[1].strip("[]"), int(found[2]), found[3], self.own_host)
