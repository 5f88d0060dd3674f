"""A store of objects, as far as a copy of a run needs it: bytes by name, and one head that is exchanged atomically."""

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

from asyncrl.errors import ConfigError

PARTS = "objects/"
"""Prefix of the names of all objects but the head."""


class OtherWriter(ConfigError):
    """The head was written by somebody else since it was read."""


class Objects(Protocol):
    """Every method waits for the store for a bounded time, and raises OSError when it cannot be reached. Several
    threads may call them at a time. blocks: grows while bytes of a put move, however long the whole of it takes."""

    address: str
    blocks: int

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        ...

    def remove(self, names: list[str]) -> None: ...

    def names(self) -> set[str]:
        """Returns the names of all objects that begin with PARTS."""
        ...

    def read_head(self) -> tuple[bytes, str] | None:
        """Returns the head and its tag; None where there is none."""
        ...

    def write_head(self, data: bytes, after: str) -> str:
        """Writes the head if its tag is still `after` ("": there is none), and returns the new tag. Raises OtherWriter
        when it is not."""
        ...


@dataclass
class MemoryObjects:
    """Objects in memory. failing: names whose next put fails."""

    address: str = "memory://run"
    objects: dict[str, bytes] = field(default_factory=dict)
    head: bytes | None = None
    failing: set[str] = field(default_factory=set)
    blocks: int = 0

    def put(self, name: str, data: bytes) -> None:
        if name in self.failing:
            self.failing.remove(name)
            raise OSError(f"{self.address} did not take {name}")
        self.objects[name] = data

    def get(self, name: str) -> bytes:
        if name not in self.objects:
            raise FileNotFoundError(f"{self.address} has no {name}")
        return self.objects[name]

    def remove(self, names: list[str]) -> None:
        for name in names:
            self.objects.pop(name, None)

    def names(self) -> set[str]:
        return {name for name in self.objects if name.startswith(PARTS)}

    def read_head(self) -> tuple[bytes, str] | None:
        return None if self.head is None else (self.head, _tag(self.head))

    def write_head(self, data: bytes, after: str) -> str:
        if after != ("" if self.head is None else _tag(self.head)):
            raise OtherWriter(f"{self.address} was written by another run")
        self.put("head", data)
        self.head = data
        return _tag(data)


def _tag(data: bytes) -> str:
    return sha256(data).hexdigest()
