"""Pairs over NCCL, polled: nothing blocks but its deadline, and an abort takes effect within a poll.

    connect ── in progress? ── post a group of sends or receives ── in progress? ── done on the stream? ── next group
                  └────────── deadline, abort, asynchronous error ──────────┴── abort the communicator

Logic apart from the device: NcclLibrary is what it needs of NCCL (nccl_libraries.py). On a device it moved nothing yet.
"""

import base64
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from asyncrl.errors import DeadlineExceeded, PeerLost

POLL = 0.0002
"""Seconds between two looks: below what a group of parts takes."""

PART_BYTES = 64 << 20
"""Bytes of a part: what a message costs is little beside it."""


class NcclLibrary(Protocol):
    """The part of NCCL that a pair needs, on one device. A communicator is whatever `connect` returns."""

    device: str

    def unique_id(self) -> bytes: ...

    def connect(self, unique_id: bytes, rank: int) -> Any:
        """Begins to connect one of two ranks, and returns at once where the binding has non-blocking communicators."""

    def failure(self, communicator: Any) -> str | None:
        """Returns "" while all is well, what NCCL says of a failure, and None while a call is in progress."""

    def post(self, communicator: Any, parts: Sequence[Tensor], peer: int, *, send: bool) -> None:
        """Posts a group of sends or receives on the communicator's own stream."""

    def finished(self, communicator: Any) -> bool:
        """Returns whether the device has done what was posted last."""

    def abort(self, communicator: Any) -> None:
        """Ends what is in flight, and frees the communicator."""


class NcclBackend:
    """Implements Backend."""

    part_bytes = PART_BYTES

    def __init__(self, library: NcclLibrary) -> None:
        self._library = library
        self.device = library.device

    def invite(self) -> str:
        return base64.b64encode(self._library.unique_id()).decode()

    def connect(self, meeting: str, rank: int, seconds: float) -> "NcclPair":
        pair = NcclPair(self._library, self._library.connect(base64.b64decode(meeting), rank), 1 - rank)
        pair.wait(lambda: True, f"rank {1 - rank} did not come", seconds)
        return pair

    def close(self) -> None:
        """Does nothing: a unique id serves one pair."""


class NcclPair:
    """Implements Communicator."""

    def __init__(self, library: NcclLibrary, communicator: Any, peer: int) -> None:
        self._library = library
        self._communicator = communicator
        self._peer = peer
        self._abort = threading.Event()

    def send(self, parts: Sequence[Tensor], seconds: float) -> None:
        self._move(parts, seconds, send=True)

    def receive(self, parts: Sequence[Tensor], seconds: float) -> None:
        self._move(parts, seconds, send=False)

    def abort(self) -> None:
        self._abort.set()

    def close(self) -> None:
        """Frees the communicator by an abort, which no hanging peer can delay: a destroy waits for all ranks."""
        self._abort.set()
        if self._communicator is not None:
            self._library.abort(self._communicator)
            self._communicator = None

    def wait(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        """Polls until no call is in progress and `done`; closes the pair when it fails."""
        until = time.monotonic() + seconds
        error: DeadlineExceeded | PeerLost | None = None
        while error is None:
            failure = self._library.failure(self._communicator)
            if failure:
                error = PeerLost(f"{what}: NCCL says {failure}")
            elif failure == "" and done():
                return
            elif time.monotonic() >= until:
                error = DeadlineExceeded(f"{what} within {seconds:.1f} s")
            elif self._abort.wait(POLL):
                error = PeerLost(f"{what}: the pair was aborted")
        self.close()
        raise error

    def _move(self, parts: Sequence[Tensor], seconds: float, *, send: bool) -> None:
        if self._abort.is_set():
            raise PeerLost(f"the pair with rank {self._peer} was aborted")
        self._library.post(self._communicator, parts, self._peer, send=send)
        self.wait(lambda: self._library.finished(self._communicator), f"rank {self._peer} moved no weights", seconds)
