"""Pairs over gloo: the same path as NCCL's, on CPUs. Nothing is encrypted, so it is for one host or a trusted network.

Both ends meet at a TCP store of the trainer under a name that the encrypted control wire has told them.
"""

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from asyncrl.errors import DeadlineExceeded, PeerLost
from asyncrl.lanes.bound_socket import bound_socket

LEAST_WAIT = 0.001
"""Seconds: gloo takes a wait of 0 s for one without an end."""

PART_BYTES = 2 << 20


gloo: Any = ProcessGroupGloo
"""Its stubs lack most of what it has."""


class GlooBackend:
    """Implements Backend. host: address of this end, at which others reach it."""

    device = "cpu"
    part_bytes = PART_BYTES

    def __init__(self, host: str) -> None:
        self._host = host
        self._store: TCPStore | None = None
        self._port = 0

    def invite(self) -> str:
        if self._store is None:
            self._store = self._listen()
        return f"{self._host}:{self._port}/{secrets.token_hex(16)}"

    def connect(self, meeting: str, rank: int, seconds: float) -> "GlooPair":
        place, _, name = meeting.partition("/")
        host, _, port = place.rpartition(":")
        wait = timedelta(seconds=max(seconds, LEAST_WAIT))
        try:
            store = TCPStore(host, int(port), None, False, wait, wait_for_workers=False)
            options = gloo._Options()
            options._timeout = wait
            options._devices = [gloo.create_device(hostname=self._host)]
            group = gloo(PrefixStore(name, store), rank, 2, options)
        except RuntimeError as error:
            raise _explained(error, f"rank {1 - rank} of the pair at {place} did not come", seconds) from error
        return GlooPair(group, 1 - rank)

    def close(self) -> None:
        self._store = None

    def _listen(self) -> TCPStore:
        listener = bound_socket(self._host, 0, "weights.transport")
        listener.listen(socket.SOMAXCONN)
        self._port = listener.getsockname()[1]
        # Given only a name, the store would listen on every interface. It closes the socket itself.
        return TCPStore(self._host, self._port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


class GlooPair:
    """Implements Communicator. gloo cannot interrupt a wait: after `abort` it ends by its deadline, or when the other
    end closes."""

    def __init__(self, group: Any, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._aborted = False

    def send(self, parts: Sequence[Tensor], seconds: float) -> None:
        group = self._open()
        self._move(lambda part: group.send([part], self._peer, 0), parts, seconds)

    def receive(self, parts: Sequence[Tensor], seconds: float) -> None:
        group = self._open()
        self._move(lambda part: group.recv([part], self._peer, 0), parts, seconds)

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._group = None

    def _open(self) -> Any:
        if self._aborted or self._group is None:
            raise PeerLost(f"the pair with rank {self._peer} was aborted")
        return self._group

    def _move(self, post: Callable[[Tensor], Any], parts: Sequence[Tensor], seconds: float) -> None:
        """Posts all parts, then waits for each. Of a peer that has gone before, gloo tells when a part is posted."""
        until = time.monotonic() + seconds
        try:
            for work in [post(part) for part in parts]:
                work.wait(timedelta(seconds=max(until - time.monotonic(), LEAST_WAIT)))
        except RuntimeError as error:
            raise _explained(error, f"rank {self._peer} moved no weights", seconds) from error


def _explained(error: RuntimeError, what: str, seconds: float) -> DeadlineExceeded | PeerLost:
    """Returns our error for one of gloo, which tells a late peer from one that is gone only in its text."""
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return DeadlineExceeded(f"{what} within {seconds:.1f} s ({text:.120})")
    return PeerLost(f"{what}: it is gone ({text:.120})")
