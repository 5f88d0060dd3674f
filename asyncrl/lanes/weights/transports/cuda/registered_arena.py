"""An arena in shared memory that is registered with CUDA, by a process that copies from it to a device.

    arena ── mapped for reading ── registered once ── copies at the speed of the bus ── unregistered at close

The driver copies from memory that is not registered in parts, through a buffer of its own.
"""

from collections.abc import Callable

import structlog
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.lanes.weights.arena import Reader
from asyncrl.lanes.weights.receiver_report import Fetched
from asyncrl.lanes.weights.transports.cuda.runtime import CudaRuntime
from asyncrl.protocols.messages import Published

log = structlog.get_logger(__name__)


def register_arena(reader: Reader, open_cuda: Callable[[], CudaRuntime]) -> None:
    """Registers a reader's mapping until the reader is closed. Call it once for each reader. Where CuPy is missing or
    the device refuses, it says so in one line of the log, and copies come from pageable memory."""
    address, size = reader.mapping
    try:
        cuda = open_cuda()
        cuda.register(address, size, read_only=True)
    except (ConfigError, MemoryError) as error:
        log.warning("new weights are copied from pageable memory", arena=reader.address, reason=str(error))
        return
    reader.before_close.callback(cuda.unregister, address)


class RegisteredArena:
    """Implements WeightReceiver for an engine that copies to a device. The arena is registered with the first version,
    on the thread that copies, because pinning takes time."""

    def __init__(self, reader: Reader, open_cuda: Callable[[], CudaRuntime]) -> None:
        self._reader = reader
        self._open_cuda = open_cuda
        self._is_pageable = True

    async def fetch(self, published: Published) -> Fetched:
        return await self._reader.fetch(published)

    def tensors(self, published: Published) -> dict[str, Tensor]:
        if self._is_pageable:
            self._is_pageable = False
            register_arena(self._reader, self._open_cuda)
        return self._reader.tensors(published)

    def check(self, published: Published) -> None:
        self._reader.check(published)

    def close(self) -> None:
        self._reader.close()
