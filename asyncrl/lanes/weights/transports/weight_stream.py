"""The trainer's side of a network: versions in buffers of their own, so that the trainer waits for no receiver.

Of three buffers one has the newest version, one the version that a slow receiver pulls or differences build on, and one
is written. A receiver that is slower than two versions is finished first: of versions that are pulled, the oldest
stays. Receivers of a version that is overwritten are refused, and take the newest.
"""

import asyncio
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.shared_memory import Segment
from asyncrl.lanes.weights.codec.chunk import LOSSY
from asyncrl.lanes.weights.leases import Leases, slot_of
from asyncrl.lanes.weights.slot_memory import checked, digest, digested_tensor, fill, views
from asyncrl.lanes.weights.transports.chunk_plan import ChunkPlan
from asyncrl.lanes.weights.transports.copied_versions import BUFFERS, CopiedVersions
from asyncrl.lanes.weights.transports.held_version import HeldVersion
from asyncrl.lanes.weights.transports.weight_server import WeightServer
from asyncrl.protocols.messages import Hello, Published


class StreamSender:
    """Implements WeightSender over a wire. `write` runs on one thread, everything else on the event loop."""

    def __init__(
        self,
        plan: ChunkPlan,
        wire: Wire,
        address: str,
        hello: Hello,
        tasks: asyncio.TaskGroup,
        *,
        heartbeat: float | None = None,
    ) -> None:
        self.leases: Leases = CopiedVersions()
        self.server = WeightServer(wire, address, hello, tasks, heartbeat=heartbeat)
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._buffers: list[Segment] = []
        self._stored: list[HeldVersion] = []  # oldest first

    def write(self, incarnation: int, version: int, named_tensors: Mapping[str, Tensor]) -> Published:
        """Implements WeightSender. Raises MemoryError when there is too little for a buffer."""
        spec = self._plan.spec
        tensors = checked(named_tensors, spec)
        memory = self._free_buffer()
        fill(views(memory.data, spec), tensors)
        before = self._stored[-1] if self._stored else None
        held = HeldVersion(self._plan, incarnation, version, memory)
        if before is not None and before.version < version:
            held.base, held.base_version = before, before.version
        self._stored.append(held)
        self.server.held = {each.version: each for each in self._stored}
        digest_of = digested_tensor(spec, version)
        exact = "" if self._plan.codec in LOSSY else digest(memory.data, spec, digest_of)
        address, seconds = self.server.address, self._plan.deadline
        return Published(incarnation, version, address, slot_of(version), exact, digest_of, transfer=seconds)

    def forget(self, reader: str) -> None:
        for held in self._stored:
            held.pulled_at.pop(reader, None)
            if reader in held.receivers:
                held.receivers[reader] = ""  # Its place stays, so that others keep theirs; the trainer stands in.

    def close(self) -> None:
        self.server.close()

    def _free_buffer(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        if len(self._buffers) < BUFFERS:
            self._buffers.append(Segment.private(max(self._plan.spec.size, 1)))
            return np.frombuffer(self._buffers[-1].buffer, np.uint8)[: self._plan.spec.size]
        since = self._loop.time() - max((part.deadline for part in self._plan.parts), default=0.0)
        older = self._stored[:-1]
        pulled = [held for held in older if max(held.pulled_at.values(), default=since) > since]
        unused = [held for held in older if held not in pulled]
        victim = unused[0] if unused else pulled[-1]
        self._stored.remove(victim)
        self.server.held = {each.version: each for each in self._stored}
        victim.overwrite()
        return victim.memory
