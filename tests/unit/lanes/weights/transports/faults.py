"""Backends of pairs for tests: one that adds faults to another, and NCCL's behaviour without a device."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import uuid4

import torch
from torch import Tensor

from asyncrl.errors import PeerLost
from asyncrl.lanes.weights.transports.communicator import Backend, Communicator


class FaultyBackend:
    """Passes everything on to `inner`. going: cleared, every send waits until its pair is aborted or it is set again.
    stalled: names of threads whose sends wait too. sends: groups until the thread that sends breaks its pair, as a
    process that dies does; None: never. sent: parts that were sent. receiving: groups that
    are waited for."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.device = inner.device
        self.part_bytes = inner.part_bytes
        self.going = threading.Event()
        self.going.set()
        self.stalled: set[str] = set()
        self.sends: int | None = None
        self.sent = 0
        self.receiving = 0
        self.invite = inner.invite
        self.close = inner.close

    def connect(self, meeting: str, rank: int, seconds: float) -> "FaultyPair":
        return FaultyPair(self, self.inner.connect(meeting, rank, seconds))


class FaultyPair:
    def __init__(self, faults: FaultyBackend, inner: Communicator) -> None:
        self._faults = faults
        self._inner = inner
        self._aborted = threading.Event()
        self.close = inner.close

    def receive(self, parts: Sequence[Tensor], seconds: float) -> None:
        self._faults.receiving += 1
        try:
            self._inner.receive(parts, seconds)
        finally:
            self._faults.receiving -= 1

    def send(self, parts: Sequence[Tensor], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._faults.going.wait(0.001) or threading.current_thread().name in self._faults.stalled:
            if self._aborted.is_set() or time.monotonic() > until:
                raise PeerLost("stalled")
        if self._faults.sends is not None:
            self._faults.sends -= 1
            if self._faults.sends < 0:
                self._faults.sends = None
                self._inner.close()
                raise PeerLost("killed")
        self._inner.send(parts, seconds)
        self._faults.sent += len(parts)

    def abort(self) -> None:
        self._aborted.set()
        self._inner.abort()


@dataclass(eq=False)
class _Rank:
    """One end in the twin of NCCL. posted: sends or receives that are not done. sends: whether they are sends."""

    unique_id: bytes
    number: int
    posted: deque[Tensor] = field(default_factory=deque)
    sends: bool = False
    freed: bool = False
    failure: str = ""


class TwinNccl:
    """Implements NcclLibrary in the memory of this process. As with NCCL nothing blocks, and of a peer that is gone a
    rank learns nothing: its transfers stay in progress for ever. `fail` makes every rank report an error instead."""

    device = "cpu"

    def __init__(self) -> None:
        self._ranks: dict[bytes, dict[int, _Rank]] = defaultdict(dict)
        self._threads: dict[_Rank, int] = {}
        self._lock = threading.Lock()

    def unique_id(self) -> bytes:
        return uuid4().bytes * 8

    def connect(self, unique_id: bytes, rank: int) -> _Rank:
        with self._lock:
            made = self._ranks[unique_id][rank] = _Rank(unique_id, rank)
            self._threads[made] = threading.get_ident()
            return made

    def failure(self, rank: _Rank) -> str | None:
        self._check(rank)
        return rank.failure or (None if len(self._ranks[rank.unique_id]) < 2 else "")

    def post(self, rank: _Rank, parts: Sequence[Tensor], peer: int, *, send: bool) -> None:
        self._check(rank)
        with self._lock:
            assert not rank.posted, "a group is posted before the last one is done"
            rank.posted.extend(parts)
            rank.sends = send

    def finished(self, rank: _Rank) -> bool:
        self._check(rank)
        with self._lock:
            other = self._ranks[rank.unique_id][1 - rank.number]
            while rank.posted and other.posted and other.sends != rank.sends and not (rank.freed or other.freed):
                mine = rank.posted.popleft()
                theirs = other.posted.popleft()
                assert mine.numel() == theirs.numel(), "both sides must cut alike"
                with torch.no_grad():
                    (theirs if rank.sends else mine).copy_(mine if rank.sends else theirs)
            return not rank.posted

    def abort(self, rank: _Rank) -> None:
        self._check(rank)
        rank.freed = True

    def fail(self, text: str) -> None:
        for ranks in self._ranks.values():
            for rank in ranks.values():
                rank.failure = text

    @property
    def leaked(self) -> list[bytes]:
        """Returns the pairs of which one end was never freed."""
        return [key for key, ranks in self._ranks.items() if not all(rank.freed for rank in ranks.values())]

    def _check(self, rank: _Rank) -> None:
        assert not rank.freed, "a communicator is used after it was freed"
        assert self._threads[rank] == threading.get_ident(), "a communicator is used on two threads"
