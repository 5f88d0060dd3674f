"""Bindings of NCCL: nccl4py, whose communicators do not block, else CuPy's. Neither moved weights on a device yet.

CuPy's communicators always block while they connect: such a wait ends with the deadline of whoever waits for the
thread, and the thread stays behind until its process ends.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import ConfigError, PeerLost

SUCCESS, IN_PROGRESS = 0, 7
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
def _peer_lost_for(errors: type[Exception]) -> Iterator[None]:
    """Turns what a binding raises for any failure of NCCL into PeerLost."""
    try:
        yield
    except errors as error:
        raise PeerLost(f"NCCL failed: {error}") from error


class _OnDevice:
    """Streams and events of torch, which both bindings share."""

    def __init__(self, device: str) -> None:
        self.device = device

    def finished(self, communicator: _Communicator) -> bool:
        return bool(communicator.posted.query())  # type: ignore[no-untyped-call]

    def post(self, communicator: _Communicator, parts: Sequence[Tensor], peer: int, *, send: bool) -> None:
        # The writes of the trainer into these parts are complete: their digest was read back from the device.
        self._post(communicator, parts, peer, send)
        communicator.posted.record(communicator.stream)

    def _post(self, communicator: _Communicator, parts: Sequence[Tensor], peer: int, send: bool) -> None:
        raise AssertionError("a binding implements this")


class Nccl4py(_OnDevice):
    """Implements NcclLibrary with nccl4py."""

    def unique_id(self) -> bytes:
        from nccl.core import get_unique_id

        return bytes(get_unique_id())

    def connect(self, unique_id: bytes, rank: int) -> _Communicator:
        from nccl.bindings.nccl import NCCLError
        from nccl.core import Communicator, NCCLConfig, UniqueId

        torch.cuda.set_device(self.device)
        config = NCCLConfig(blocking=False, max_ctas=MOST_CTAS)
        with _peer_lost_for(NCCLError):
            return _Communicator(Communicator.init(2, rank, UniqueId.from_bytes(unique_id), config), self.device)

    def failure(self, communicator: _Communicator) -> str | None:
        state = int(communicator.handle.get_async_error())  # A plain int, against the annotation of nccl4py 0.6.0.
        if state == IN_PROGRESS:
            return None
        return "" if state == SUCCESS else f"error {state}: {communicator.handle.get_last_error()}"

    def abort(self, communicator: _Communicator) -> None:
        communicator.handle.abort()

    def _post(self, communicator: _Communicator, parts: Sequence[Tensor], peer: int, send: bool) -> None:
        from nccl.bindings.nccl import NCCLError
        from nccl.core import group

        move = communicator.handle.send if send else communicator.handle.recv
        with _peer_lost_for(NCCLError), group():
            for part in parts:
                move(part, peer, stream=communicator.stream.cuda_stream)


class CupyNccl(_OnDevice):
    """Implements NcclLibrary with CuPy."""

    def unique_id(self) -> bytes:
        from cupy.cuda import nccl

        return bytes(nccl.get_unique_id())

    def connect(self, unique_id: bytes, rank: int) -> _Communicator:
        from cupy.cuda import nccl

        torch.cuda.set_device(self.device)
        with _peer_lost_for(nccl.NcclError):
            return _Communicator(nccl.NcclCommunicator(2, unique_id, rank), self.device)

    def failure(self, communicator: _Communicator) -> str | None:
        from cupy.cuda import nccl

        try:
            communicator.handle.check_async_error()
        except nccl.NcclError as error:
            return str(error)
        return ""

    def abort(self, communicator: _Communicator) -> None:
        communicator.handle.abort()

    def _post(self, communicator: _Communicator, parts: Sequence[Tensor], peer: int, send: bool) -> None:
        from cupy.cuda import nccl

        move = communicator.handle.send if send else communicator.handle.recv
        with _peer_lost_for(nccl.NcclError):
            nccl.groupStart()
            for part in parts:
                move(part.data_ptr(), part.numel(), nccl.NCCL_UINT8, peer, communicator.stream.cuda_stream)
            nccl.groupEnd()


def nccl_library(device: str) -> Nccl4py | CupyNccl:
    """Chooses a binding. Raises ConfigError when none is installed."""
    if find_spec("nccl") is not None:
        return Nccl4py(device)
    if find_spec("cupy") is not None:
        return CupyNccl(device)
    raise ConfigError('weights.transport = "nccl" needs nccl4py or CuPy: install the extra cu12, or cu13')
