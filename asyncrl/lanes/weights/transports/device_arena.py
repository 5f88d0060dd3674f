"""Two slots in the memory of one GPU, which the trainer writes in turn and engines read in place under leases.

    shared memory:  | magic, digest | stamps at 64 and 128 | handle at 192 |      device:  | slot 0 | slot 1 |

It is the arena of arena.py with its slots on the device: the handle names one long-lived allocation and is read once
by each reader; a version costs one copy on the device. A version is published when its copies are done.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from asyncrl.errors import ConfigError, PeerLost
from asyncrl.lanes.shared_memory import Segment
from asyncrl.lanes.weights.arena import HEADER, Reader, Writer, bytes_of_slots, open_header
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.protocols.messages import Published

# The boundary to CUDA: everything above it runs in tests without a device.


HANDLE_BYTES = 64
"""Bytes of a cudaIpcMemHandle_t."""


class CudaRuntime(Protocol):
    """Memory of one device that processes share. Pointers are addresses of allocations as a whole."""

    device: str

    def allocate(self, size: int) -> int:
        """Allocates with cudaMalloc, outside of torch's pool, whose memory may not be exported. Raises MemoryError."""

    def export(self, pointer: int) -> bytes:
        """Returns the handle of an allocation, by which other processes of this host open it."""

    def open(self, handle: bytes) -> int:
        """Maps the allocation of another process. Raises PeerLost when it is gone; a process cannot open its own."""

    def tensor(self, pointer: int, size: int) -> Tensor:
        """Returns the memory as a tensor, uint8 [size], without a copy."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Runs the copies of a block beside what the device computes, but after what was enqueued before."""

    def register(self, address: int, size: int, *, read_only: bool) -> None:
        """Pins host memory that is mapped already, so that copies from it run at the speed of the bus. read_only:
        whether it is mapped for reading only. Raises MemoryError when the device refuses, and for memory that is
        registered already."""

    def unregister(self, address: int) -> None:
        """Ends what `register` began. Does nothing on a device that has failed: its pins end with the process."""


# CUDA through CuPy.


READ_ONLY = 8
"""cudaHostRegisterReadOnly, without which CUDA refuses memory that is mapped for reading only. Some devices lack it."""


class CupyRuntime:
    """Implements CudaRuntime. Raises ConfigError when CuPy is not installed."""

    def __init__(self, device: str) -> None:
        try:
            import cupy
        except ImportError as missing:
            raise ConfigError(
                "CUDA memory that processes share needs CuPy: install the extra cu12, or cu13"
            ) from missing
        self.device = device
        self._cupy: Any = cupy
        self._number = torch.device(device).index or 0
        self._stream: torch.cuda.Stream | None = None

    def allocate(self, size: int) -> int:
        with self._here():
            try:
                return int(self._cupy.cuda.runtime.malloc(max(size, 1)))
            except self._cupy.cuda.runtime.CUDARuntimeError as error:
                raise MemoryError(f"{self.device} has no {size:,} bytes for two versions of the weights") from error

    def export(self, pointer: int) -> bytes:
        with self._here():
            return bytes(self._cupy.cuda.runtime.ipcGetMemHandle(pointer))

    def open(self, handle: bytes) -> int:
        with self._here():
            try:
                return int(self._cupy.cuda.runtime.ipcOpenMemHandle(handle))
            except self._cupy.cuda.runtime.CUDARuntimeError as error:
                raise PeerLost(
                    f"memory of {self.device} cannot be opened, its process may have ended: {error}"
                ) from error

    def tensor(self, pointer: int, size: int) -> Tensor:
        memory = self._cupy.cuda.UnownedMemory(pointer, size, None, self._number)
        array = self._cupy.ndarray(size, self._cupy.uint8, self._cupy.cuda.MemoryPointer(memory, 0))
        found: Tensor = from_dlpack(array)
        return found

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def register(self, address: int, size: int, *, read_only: bool) -> None:
        try:
            with self._here():
                self._cupy.cuda.runtime.hostRegister(address, size, READ_ONLY if read_only else 0)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise MemoryError(f"{self.device} cannot pin {size:,} bytes of host memory: {error}") from error

    def unregister(self, address: int) -> None:
        with suppress(self._cupy.cuda.runtime.CUDARuntimeError), self._here():
            self._cupy.cuda.runtime.hostUnregister(address)

    def _here(self) -> Any:
        return self._cupy.cuda.Device(self._number)


DEVICE_SCHEME = "cuda-ipc://"
MAGIC = b"ARLWCUD1"
HANDLE_AT = 192


def open_device_writer(name: str, spec: WeightsSpec, runtime: CudaRuntime) -> Writer:
    """Makes an arena. Raises MemoryError when the device has no room for two slots."""
    size = bytes_of_slots(spec)
    pointer = runtime.allocate(size)
    header = Segment.create(name, HEADER)
    header.buffer[HANDLE_AT : HANDLE_AT + HANDLE_BYTES] = runtime.export(pointer)
    block = runtime.tensor(pointer, size)
    return Writer(DEVICE_SCHEME + name, header, block, spec, MAGIC, runtime.side_stream)


def open_device_reader(published: Published, spec: WeightsSpec, runtime: CudaRuntime) -> Reader:
    """Attaches to an arena; the device memory stays mapped while this process lives, for views of it are in use. Raises
    PeerLost when the trainer has ended, and WeightsError for another model."""
    header = open_header(published, spec, MAGIC, DEVICE_SCHEME)
    handle = bytes(header.buffer[HANDLE_AT : HANDLE_AT + HANDLE_BYTES])
    block = runtime.tensor(runtime.open(handle), bytes_of_slots(spec))
    return Reader(published.arena, header, block, spec, reopens=False)


# An arena in shared memory that is registered with CUDA, by a process that copies from it to a device.
#
#     arena ── mapped for reading ── registered once ── copies at the speed of the bus ── unregistered at close
#
# The driver copies from memory that is not registered in parts, through a buffer of its own.


log = structlog.get_logger(__name__)


def register_arena(reader: Reader, open_cuda: Callable[[], CudaRuntime]) -> None:
    """Registers a reader's mapping until the reader is closed. Call it once for each reader, on the thread that copies,
    because pinning takes time. Where CuPy is missing or
    the device refuses, it says so in one line of the log, and copies come from pageable memory."""
    address, size = reader.mapping
    try:
        cuda = open_cuda()
        cuda.register(address, size, read_only=True)
    except (ConfigError, MemoryError) as error:
        log.warning("new weights are copied from pageable memory", arena=reader.address, reason=str(error))
        return
    reader.before_close.callback(cuda.unregister, address)
