"""The two ends of a transport of weights, as a trainer and an engine see them, and how a run opens them.

write ── Published ── fetch ── tensors ── check
trainer  controller   loop     compute thread of the engine

The address that is published says which transport it is.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import Tensor

from asyncrl.lanes.bound_socket import host_of
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.shared_memory import SHARED_SCHEME
from asyncrl.lanes.weights.arena import open_reader, open_writer
from asyncrl.lanes.weights.chunk_codec import WireCodec
from asyncrl.lanes.weights.leases import Fetched, Leases
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.lanes.weights.transports.collective_transfer import CollectiveReceiver, CollectiveSender
from asyncrl.lanes.weights.transports.communicator import Backend, GlooBackend
from asyncrl.lanes.weights.transports.device_arena import (
    DEVICE_SCHEME,
    CudaRuntime,
    CupyRuntime,
    open_device_reader,
    open_device_writer,
    register_arena,
)
from asyncrl.lanes.weights.transports.nccl import Nccl4py, NcclBackend
from asyncrl.lanes.weights.transports.version_transfer import ChunkPlan, LaneEnd
from asyncrl.lanes.weights.transports.weight_files import FILE_SCHEME, FileReceiver, FileSender
from asyncrl.lanes.weights.transports.weight_stream import StreamReceiver, StreamSender
from asyncrl.protocols.messages import Hello, Published
from asyncrl.protocols.weight_transports import TRANSPORTS


class WeightSender(Protocol):
    """The trainer's side. leases: when a version may be written; without effect where readers copy."""

    leases: Leases

    def write(self, incarnation: int, version: int, named_tensors: Mapping[str, Tensor]) -> Published:
        """Takes a version over, and returns how readers find it. named_tensors has every name of the specification.
        Raises WeightsError when names, shapes or tied tensors do not fit it."""

    def forget(self, reader: str) -> None:
        """Notes that a reader is gone."""

    def close(self) -> None:
        """Frees what readers of a published version find; views that they have stay valid."""


class WeightReceiver(Protocol):
    """An engine's side. What it returned stays valid and unchanged until `tensors` has returned the next version.
    reopens: whether nothing of it is left once it is closed; else its process ends with its trainer."""

    reopens: bool

    async def fetch(self, published: Published) -> Fetched:
        """Brings the version to this process, if it has to be copied. The version before stays whole meanwhile, and
        when this fails. Called again, it goes on where it was.

        Raises:
            Refused: the sender does not have the version any more.
            PeerLost: the sender is gone.
            DeadlineExceeded: it did not come in the time that its bytes take over a slow network.
            WeightsError: it cannot be used: damaged more than once, or of another model.
        """

    def tensors(self, published: Published) -> dict[str, Tensor]:
        """Returns the tensors of a fetched version by every name, aliases included. Never write to them. Raises
        WeightsError when they do not match its digest, or are not there."""

    def check(self, published: Published) -> None:
        """Raises WeightsError unless the version is still whole. Who copies asks again afterwards."""

    def close(self) -> None: ...


NETWORK = "tcp://"
PAIRS = tuple(name for name, each in TRANSPORTS.items() if each.needs_ranks)
"""Transports over pairs of ranks. Their addresses are `gloo+` and the address of a control wire."""


@dataclass(frozen=True, slots=True)
class WeightNetwork:
    """Holds what an end needs to use a network. address: where it listens, with `*` for a port that the system chooses.
    tasks: they end with the worker. codec: the same at both ends. device: of the model at this end."""

    wire: Wire
    address: str
    hello: Hello
    tasks: asyncio.TaskGroup
    codec: WireCodec = WireCodec.DENSE
    heartbeat: float | None = None
    device: str = "cpu"

    def end(self) -> LaneEnd:
        return LaneEnd(self.wire, self.address, self.hello, self.tasks, self.heartbeat)

    def pair(self, transport: str, spec: WeightsSpec) -> tuple[ChunkPlan, str, Backend, LaneEnd]:
        """Returns what an end of "gloo" or "nccl" is made of."""
        backend = self.backend(transport)
        return ChunkPlan.of(spec, WireCodec.DENSE, backend.part_bytes), f"{transport}+", backend, self.end()

    def backend(self, transport: str) -> Backend:
        """Makes the backend of a pair, with gloo at the host at which this end listens."""
        if transport == "nccl":
            return NcclBackend(Nccl4py(self.device))
        return GlooBackend(host_of(self.address))

    def cuda(self) -> CudaRuntime:
        """Opens the device of the model at this end."""
        return CupyRuntime(self.device)


Network = Callable[[], WeightNetwork]
"""Makes what an end needs to use a network, where one is used."""


def open_sender(transport: str, arena_name: str, spec: WeightsSpec, network: Network, folder: Path) -> WeightSender:
    """Opens the trainer's end, on the event loop for transports that listen. transport: as TRANSPORTS has them but
    "auto". arena_name: of shared memory. folder: for files. Raises ArenaFull when there is too little memory for two
    slots, MemoryError when a device has too little."""
    if transport == "tcp":
        ours = network()
        return StreamSender(ChunkPlan.of(spec, ours.codec), ours.end())
    if transport in PAIRS:
        return CollectiveSender(*network().pair(transport, spec))
    if transport == "cuda_ipc":
        return open_device_writer(arena_name, spec, network().cuda())
    if transport == "file":
        return FileSender(folder, spec)
    return open_writer(arena_name, spec, "inproc" if transport == "inproc" else "ipc")


def open_receiver(published: Published, spec: WeightsSpec, network: Network, device: str) -> WeightReceiver:
    """Opens an engine's end on the event loop. device: of the engine. Raises PeerLost when the trainer has ended,
    WeightsError when both have different models."""
    if published.arena.startswith(NETWORK):
        ours = network()
        return StreamReceiver(ChunkPlan.of(spec, ours.codec), ours.end())
    pairs, plus, _ = published.arena.partition("+")
    if plus and pairs in PAIRS:
        return CollectiveReceiver(*network().pair(pairs, spec))
    if published.arena.startswith(FILE_SCHEME):
        return FileReceiver(spec)
    if published.arena.startswith(DEVICE_SCHEME):
        return open_device_reader(published, spec, network().cuda())
    reader = open_reader(published, spec)
    if published.arena.startswith(SHARED_SCHEME) and device.startswith("cuda"):
        reader.before_first = partial(register_arena, open_cuda=lambda: network().cuda())
    return reader
