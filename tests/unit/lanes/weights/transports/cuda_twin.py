"""CUDA without a device: memory that processes share lies in files, and a handle is the name of one."""

import mmap
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from asyncrl.errors import PeerLost
from asyncrl.lanes.shared_memory import SHARED_MEMORY
from asyncrl.lanes.weights.transports.device_arena import HANDLE_BYTES


class TwinCuda:
    """Implements CudaRuntime for one process. As with CUDA, a process cannot open its own handle, and memory is that of
    the process that allocated it: `end` is its end."""

    device = "cpu"

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._own: dict[int, Path] = {}
        self.registered: dict[int, int] = {}

    def allocate(self, size: int) -> int:
        path = SHARED_MEMORY / f"asyncrl-test-cuda-{uuid4().hex}"
        path.write_bytes(bytes(max(size, 1)))
        pointer = self._map(path)
        self._own[pointer] = path
        return pointer

    def export(self, pointer: int) -> bytes:
        return self._own[pointer].name.encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        path = SHARED_MEMORY / handle.rstrip(b"\0").decode()
        assert path not in self._own.values(), "cudaErrorDeviceUninitialized: a process cannot open its own handle"
        if not path.exists():
            raise PeerLost("cudaErrorInvalidValue")
        return self._map(path)

    def tensor(self, pointer: int, size: int) -> Tensor:
        return torch.frombuffer(self._maps[pointer], dtype=torch.uint8, count=size)

    def side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def register(self, address: int, size: int, *, read_only: bool) -> None:
        if address in self.registered:
            raise MemoryError("cudaErrorHostMemoryAlreadyRegistered")
        if is_writable(address) == read_only:
            raise MemoryError("cudaErrorInvalidValue")
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def end(self) -> None:
        for path in self._own.values():
            path.unlink(missing_ok=True)

    def _map(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR)
        try:
            mapped = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        pointer = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        self._maps[pointer] = mapped
        return pointer


def is_writable(address: int) -> bool:
    """Returns whether an address of this process is mapped for writing. Raises StopIteration when it is not mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = ((*(int(end, 16) for end in line.split()[0].split("-")), line.split()[1]) for line in lines)
    return "w" in next(rights for start, end, rights in ranges if start <= address < end)
