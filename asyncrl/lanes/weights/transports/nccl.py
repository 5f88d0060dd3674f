"""Pairs over NCCL, polled: nothing blocks but its deadline, and an abort takes effect within a poll.

    connect ── in progress? ── post a group of sends or receives ── in progress? ── done on the stream? ── next group
                  └────────── deadline, abort, asynchronous error ──────────┴── abort the communicator

Logic apart from the device: NcclLibrary is what it needs of NCCL. On a device it moved nothing yet.
"""

import base64
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncrl.errors import ConfigError, DeadlineExceeded, PeerLost

# NCCL by nccl4py, whose communicators do not block. It has moved no weights on a device yet.


SUCCESS = 0
IN_PROGRESS = 7
"""ncclSuccess and ncclInProgress of ncclResult_t."""

MOST_CTAS = 8
"""Blocks of a kernel: few, because the engine samples beside the transfer."""


class _Communicator:
    """A communicator with its stream, and an event behind what was posted last."""

    def __init__(self, handle: Any, device: str) -> None:
        self.handle = handle
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.posted = torch.cuda.Event()  # type: ignore[no-untyped-call]


@contextmanager
def _peer_lost_for_failures() -> Iterator[None]:
    """Turns what nccl4py raises for any failure of NCCL into PeerLost."""
    from nccl.bindings.nccl import NCCLError

    try:
        yield
    except NCCLError as error:
        raise PeerLost(f"NCCL failed: {error}") from error


class Nccl4py:
    """Implements NcclLibrary. Raises ConfigError when nccl4py is not installed."""

    def __init__(self, device: str) -> None:
        if find_spec("nccl") is None:
            raise ConfigError('weights.transport = "nccl" needs nccl4py: install the extra cu12, or cu13')
        self.device = device

    def unique_id(self) -> bytes:
        from nccl.core import get_unique_id

        return bytes(get_unique_id())

    def connect(self, unique_id: bytes, rank: int) -> _Communicator:
        from nccl.core import Communicator, NCCLConfig, UniqueId

        torch.cuda.set_device(self.device)
        config = NCCLConfig(blocking=False, max_ctas=MOST_CTAS)
        with _peer_lost_for_failures():
            return _Communicator(Communicator.init(2, rank, UniqueId.from_bytes(unique_id), config), self.device)

    def failure(self, communicator: _Communicator) -> str | None:
        state = int(communicator.handle.get_async_error())  # A plain int, against the annotation of nccl4py 0.6.0.
        if state == IN_PROGRESS:
            return None
        return "" if state == SUCCESS else f"error {state}: {communicator.handle.get_last_error()}"

    def post(self, communicator: _Communicator, parts: Sequence[Tensor], peer: int, *, send: bool) -> None:
        # The writes of the trainer into these parts are complete: their digest was read back from the device.
        from nccl.core import group

        move = communicator.handle.send if send else communicator.handle.recv
        with _peer_lost_for_failures(), group():
            for part in parts:
                move(part, peer, stream=communicator.stream.cuda_stream)
        communicator.posted.record(communicator.stream)

    def finished(self, communicator: _Communicator) -> bool:
        return bool(communicator.posted.query())  # type: ignore[no-untyped-call]

    def abort(self, communicator: _Communicator) -> None:
        communicator.handle.abort()


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
    """Implements Communicator for two ranks. The thread of the pair moves and closes; any thread may `abort`, upon
    which the call that waits gives up and frees the communicator."""

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
