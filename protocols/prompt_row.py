"""The row of a prompt, which is encoded once however many samples are scored with it."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, Self

import msgpack
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The row of a prompt as MessagePack. digest: of the data; readers decode what they have not seen lately."""

    digest: bytes
    data: NDArray[np.uint8]


class PromptRow(dict[str, Any]):
    """All columns of a prompt's row, in plain values. Its samples share it, so that it cannot be changed."""

    @classmethod
    def of(cls, row: "dict[str, Any] | PackedRow") -> Self:
        """Returns the row itself, in this form. Raises ValueError for bytes that are no row."""
        if isinstance(row, cls):
            return row
        if not isinstance(row, PackedRow):
            return cls(row)
        plain = msgpack.unpackb(row.data, raw=False, strict_map_key=True)
        if not isinstance(plain, dict):
            raise ValueError(f"the row of a prompt is a map of columns, not {plain!r:.100}")
        found = cls(plain)
        found.__dict__["packed"] = row
        return found

    @cached_property
    def packed(self) -> PackedRow:
        """Returns the encoded row. Raises ValueError, OverflowError or TypeError for values that cannot be sent."""
        data = msgpack.packb(self, use_bin_type=True)
        return PackedRow(hashlib.blake2b(data, digest_size=16).digest(), np.frombuffer(data, np.uint8))

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("all samples of a prompt share its row: make a changed copy, {**row, 'name': value}")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse
