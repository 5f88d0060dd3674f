"""A trainer's and engines' ends of each transport in one process, and the faults that the suite causes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.weights.arena import BEING_WRITTEN, Writer
from asyncrl.lanes.weights.chunk_codec import WireCodec
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.lanes.weights.transports.collective_transfer import CollectiveSender
from asyncrl.lanes.weights.transports.communicator import Backend, GlooBackend
from asyncrl.lanes.weights.transports.device_arena import CudaRuntime
from asyncrl.lanes.weights.transports.nccl import NcclBackend
from asyncrl.lanes.weights.transports.transport_ends import WeightNetwork, WeightReceiver, open_receiver, open_sender
from asyncrl.lanes.weights.transports.weight_files import FileSender
from asyncrl.lanes.weights.transports.weight_stream import StreamSender
from asyncrl.protocols import weight_transports
from asyncrl.protocols.messages import PROTOCOL, Hello, Published
from tests.unit.lanes.weights.transports.cuda_twin import TwinCuda
from tests.unit.lanes.weights.transports.faults import FaultyBackend, TwinNccl

PAIRS = tuple(name for name, each in weight_transports.TRANSPORTS.items() if each.needs_ranks)
TRANSPORTS = tuple(name for name in weight_transports.TRANSPORTS if name != "auto")
COPYING = tuple(name for name, each in weight_transports.TRANSPORTS.items() if each.taken)
SHAPES = {"model.embed_tokens.weight": (700, 64), "model.layers.0.mlp.up_proj.weight": (900, 700), "norm.weight": (7,)}
INCARNATION = 3
LIMIT = 20.0
"""Seconds in which what a test waits for on a thread or in a process must happen."""


def hello(instance: str) -> Hello:
    return Hello("aa", INCARNATION, instance.rstrip("0123456789"), 0, instance, PROTOCOL, "0.1")


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def spec_of(dtype: str) -> WeightsSpec:
    aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    return WeightsSpec.of(SHAPES, dtype, aliases, exact=["model.embed_tokens.weight"])


@dataclass(frozen=True, slots=True)
class PairNetwork(WeightNetwork):
    """Has faults in the pairs, and NCCL and CUDA without a device."""

    pairs: Backend | None = None
    twin: TwinCuda | None = None

    def cuda(self) -> CudaRuntime:
        assert self.twin is not None
        return self.twin

    def backend(self, transport: str) -> Backend:
        assert self.pairs is not None
        return self.pairs


@dataclass
class Site:
    """One transport with a trainer's end. spec: of the trainer's model."""

    transport: str
    folder: Path
    wire: Wire
    tasks: asyncio.TaskGroup
    spec: WeightsSpec
    codec: WireCodec = WireCodec.DENSE
    address: str = "tcp://127.0.0.1:*"
    receivers: list[WeightReceiver] = field(default_factory=list)
    part_bytes: int | None = None
    processes: dict[str, TwinCuda] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nccl = TwinNccl()
        inner = NcclBackend(self.nccl) if self.transport == "nccl" else GlooBackend("127.0.0.1")
        self.pairs = FaultyBackend(inner)
        self.pairs.part_bytes = self.part_bytes or inner.part_bytes
        name = f"asyncrl-test-{uuid4().hex[:12]}"
        network = partial(self.network, "training0")
        self.sender: Any = open_sender(self.transport, name, self.spec, network, self.folder)

    def network(self, instance: str) -> WeightNetwork:
        ends = (self.wire, self.address, hello(instance), self.tasks, self.codec)
        if self.transport in ("cuda_ipc", *PAIRS):
            return PairNetwork(*ends, pairs=self.pairs, twin=self.process(instance))
        return WeightNetwork(*ends)

    def process(self, instance: str) -> TwinCuda:
        """Returns CUDA of the process of an instance."""
        return self.processes.setdefault(instance, TwinCuda())

    def receiver(self, published: Published, instance: str, spec: WeightsSpec | None = None) -> Any:
        self.receivers.append(open_receiver(published, spec or self.spec, partial(self.network, instance), "cpu"))
        return self.receivers[-1]

    def write(self, version: int, tensors: dict[str, Tensor] | None = None) -> Published:
        return self.sender.write(INCARNATION, version, weights(version) if tensors is None else tensors)

    def corrupt(self, published: Published) -> None:
        """Changes one bit of the published version where the sender has it."""
        if isinstance(self.sender, StreamSender):
            self.sender.server.held[published.version].memory[100] ^= 1
        elif isinstance(self.sender, CollectiveSender):
            self.sender._stored[-1].block[100] ^= 1
        elif isinstance(self.sender, FileSender):
            path = self.sender._files[-1]
            path.write_bytes(path.read_bytes()[:-100] + bytes(100))
        else:
            assert isinstance(self.sender, Writer)
            self.sender._slots[published.slot][100] ^= 1

    def stall(self, published: Published) -> None:
        """Leaves the published version as it is in the middle of a write that does not end."""
        if isinstance(self.sender, StreamSender):
            self.sender.server.held[published.version].whole = False
        elif isinstance(self.sender, CollectiveSender):
            self.pairs.going.clear()
        elif isinstance(self.sender, FileSender):
            path = self.sender._files[-1]
            path.rename(path.with_suffix(".draft"))
        else:
            assert isinstance(self.sender, Writer)
            self.sender._stamp(published.slot, INCARNATION, BEING_WRITTEN)

    def in_transfer(self, published: Published) -> bool:
        """Returns whether a receiver waits for parts of a stalled version; what is not sent in parts is never so."""
        if isinstance(self.sender, StreamSender):
            return bool(self.sender.server.held[published.version].pulled_at)
        return self.pairs.receiving > 0

    def go_on(self, published: Published) -> None:
        """Lets a stalled write end."""
        if isinstance(self.sender, StreamSender):
            self.sender.server.held[published.version].whole = True
        elif isinstance(self.sender, CollectiveSender):
            self.pairs.going.set()
        elif isinstance(self.sender, FileSender):
            path = self.sender._files[-1]
            path.with_suffix(".draft").rename(path)
        else:
            assert isinstance(self.sender, Writer)
            self.sender._stamp(published.slot, INCARNATION, published.version)


@asynccontextmanager
async def open_site(
    transport: str,
    folder: Path,
    dtype: str = "float32",
    codec: str = "dense",
    part_bytes: int | None = None,
    keys: CurveKeys | None = None,
) -> AsyncIterator[Site]:
    """Opens a transport; at the end all ends are closed. part_bytes: of pairs."""
    spec = spec_of(dtype)
    wire = ZmqWire(keys or CurveKeys.fresh())
    try:
        async with asyncio.TaskGroup() as tasks:
            site = Site(transport, folder, wire, tasks, spec, WireCodec[codec.upper()], part_bytes=part_bytes)
            try:
                yield site
            finally:
                for receiver in site.receivers:
                    receiver.close()
                site.sender.close()
                for process in site.processes.values():
                    process.end()
    finally:
        wire.close()


async def until(done: Callable[[], bool]) -> None:
    """Lets others run until it is true."""
    async with asyncio.timeout(LIMIT):
        for _ in iter(done, True):
            await asyncio.sleep(0.001)


async def take(receiver: WeightReceiver, published: Published) -> dict[str, Tensor]:
    """Does what an engine does with a published version."""
    await receiver.fetch(published)
    tensors = receiver.tensors(published)
    receiver.check(published)
    return tensors


def with_other_digest(published: Published) -> Published:
    return replace(published, digest=f"{int(published.digest, 16) ^ 1:016x}")
