"""The objects of a copied run in memory."""

from dataclasses import dataclass, field
from hashlib import sha256

from asyncrl.controller.journal.run_copy import PARTS, Head, OtherWriter


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

    @property
    def newest(self) -> Head:
        assert self.head is not None
        return Head.decode(self.head, self.address)

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
