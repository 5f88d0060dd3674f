"""Opens both ends of the transport that a run uses. The address that is published says which one it is."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.weights.arena import open_reader, open_writer
from asyncrl.lanes.weights.codec.chunk import WireCodec
from asyncrl.lanes.weights.tensor_spec import WeightsSpec
from asyncrl.lanes.weights.transports.chunk_plan import ChunkPlan
from asyncrl.lanes.weights.transports.interface import WeightReceiver, WeightSender
from asyncrl.lanes.weights.transports.stream_receiver import StreamReceiver
from asyncrl.lanes.weights.transports.weight_files import FILE_SCHEME, FileReceiver, FileSender
from asyncrl.lanes.weights.transports.weight_stream import StreamSender
from asyncrl.protocols.messages import Hello, Published

NETWORK = "tcp://"


@dataclass(frozen=True, slots=True)
class WeightNetwork:
    """Holds what an end needs to use a network. address: where it listens, with `*` for a port that the system chooses.
    tasks: they end with the worker. codec: the same at both ends."""

    wire: Wire
    address: str
    hello: Hello
    tasks: asyncio.TaskGroup
    codec: WireCodec = WireCodec.DENSE
    heartbeat: float | None = None

    def sender(self, spec: WeightsSpec) -> StreamSender:
        """Opens the trainer's end on the event loop."""
        plan = ChunkPlan.of(spec, self.codec)
        return StreamSender(plan, self.wire, self.address, self.hello, self.tasks, heartbeat=self.heartbeat)

    def receiver(self, spec: WeightsSpec) -> StreamReceiver:
        """Opens an engine's end on the event loop."""
        plan = ChunkPlan.of(spec, self.codec)
        return StreamReceiver(plan, self.wire, self.address, self.hello, self.tasks, heartbeat=self.heartbeat)


Network = Callable[[], WeightNetwork]
"""Makes what an end needs to use a network, where one is used."""


def open_sender(transport: str, arena_name: str, spec: WeightsSpec, network: Network, folder: Path) -> WeightSender:
    """Opens the trainer's end, for "tcp" on the event loop. transport: "inproc", "shm", "tcp" or "file". arena_name: of
    shared memory. folder: for files. Raises ArenaFull when there is too little memory for two slots."""
    if transport == "tcp":
        return network().sender(spec)
    if transport == "file":
        return FileSender(folder, spec)
    return open_writer(arena_name, spec, "inproc" if transport == "inproc" else "ipc")


def open_receiver(published: Published, spec: WeightsSpec, network: Network) -> WeightReceiver:
    """Opens an engine's end on the event loop. Raises PeerLost when the trainer has ended, WeightsError when both have
    different models."""
    if published.arena.startswith(NETWORK):
        return network().receiver(spec)
    if published.arena.startswith(FILE_SCHEME):
        return FileReceiver(spec)
    return open_reader(published, spec)
