"""The boundary to CUDA: everything above it runs in tests without a device."""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

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
