"""Memory that a trainer writes and engines read; each kind is a module with functions `create` and `attach`."""

from typing import Protocol


class Memory(Protocol):
    """A block of bytes that both sides map.

    address: what `attach` takes, e.g. `shm://NAME`; buffer: writable for its creator, read-only for the others.
    """

    @property
    def address(self) -> str: ...

    @property
    def buffer(self) -> memoryview: ...

    def close(self) -> None:
        """Removes the name (its creator) or unmaps the memory (others); mapped tensors stay valid."""
        ...
