"""Memory that a trainer writes and engines read: one module a kind, same two functions `create` and `attach`."""

from typing import Protocol


class Memory(Protocol):
    """A block of bytes that both sides see.

    address: what `attach` takes, e.g. `shm://NAME`; buffer: writable for its creator, read-only for the others.
    """

    @property
    def address(self) -> str: ...

    @property
    def buffer(self) -> memoryview: ...

    def close(self) -> None:
        """Give the name back (its creator) or forget the memory (others); mapped tensors stay valid."""
        ...
