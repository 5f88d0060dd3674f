"""The two-slot weight arena: the trainer copies a version into the idle slot, engines read it in place.

    0          64             128            4096                4096 + stride
    | magic,   | stamp of     | stamp of     | slot 0: tensors   | slot 1: tensors   |
    | digest   | slot 0       | slot 1       |                   |                   |

A stamp is (incarnation, version) of a complete slot, and marks a slot that is being written. A reader that copies thus
sees whether it copied one version. Readers that read in place also hold a lease (leases.py).
"""

import struct
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np
from torch import Tensor

from asyncrl.errors import PeerLost, WeightsError
from asyncrl.lanes.shared_memory import SHARED_SCHEME, Segment
from asyncrl.lanes.weights.leases import Fetched, Leases, slot_of
from asyncrl.lanes.weights.slot_memory import (
    WeightsSpec,
    check_digest,
    checked,
    digest,
    digested_tensor,
    fill,
    views,
    with_aliases,
)
from asyncrl.protocols.messages import Published
from asyncrl.protocols.weight_transports import SLOTS

MAGIC = b"ARLWGHT1"
HEADER = 4096  # one page, so that slots begin page-aligned
STAMP = struct.Struct("<qq")
BEING_WRITTEN = -1

_process_arenas: dict[str, Segment] = {}
"""Arenas of fleets that run in this process, by address."""


class _Slots:
    """The layout of an arena, for both sides."""

    def __init__(self, address: str, segment: Segment, spec: WeightsSpec) -> None:
        self.address = address
        self._segment = segment
        self._spec = spec
        self._stride = _stride(spec)

    @property
    def _memory(self) -> memoryview:
        return self._segment.buffer

    def _slot(self, slot: int) -> memoryview:
        start = HEADER + slot * self._stride
        return self._memory[start : start + self._stride]

    def close(self) -> None:
        """Unmaps the arena, which its writer also removes; views that were returned stay valid."""
        self._segment.close()


class Writer(_Slots):
    """Writes versions on the trainer's side. leases: when a version may be written."""

    def __init__(self, address: str, segment: Segment, spec: WeightsSpec) -> None:
        super().__init__(address, segment, spec)
        self.leases = Leases()
        self._tensors = [views(self._slot(slot), spec) for slot in range(SLOTS)]
        for slot in range(SLOTS):
            self._stamp(slot, BEING_WRITTEN, BEING_WRITTEN)
        self._memory[: len(MAGIC) + len(spec.digest)] = MAGIC + spec.digest

    def write(self, incarnation: int, version: int, named_tensors: Mapping[str, Tensor]) -> Published:
        """Copies a version into its slot, cast to the specification's dtype; tensors may be on any device.

        named_tensors has every name of the specification; aliases may be given too, with equal values.
        A crash in the middle is harmless: the other slot is complete, and this one was not published.

        Raises:
            WeightsError: a name is missing or unknown, or a shape or a tied tensor does not fit.
        """
        tensors = checked(named_tensors, self._spec)
        slot = slot_of(version)
        self.leases.begin_write(version)
        self._stamp(slot, incarnation, BEING_WRITTEN)
        fill(self._tensors[slot], tensors)
        self._stamp(slot, incarnation, version)
        self.leases.end_write(version)
        digested = digested_tensor(self._spec, version)
        found = digest(self._slot(slot), self._spec, digested)
        return Published(incarnation, version, self.address, slot, found, digested)

    def forget(self, reader: str) -> None:
        self.leases.detach(reader)

    def close(self) -> None:
        self._tensors = []
        self._segment.unlink()
        _process_arenas.pop(self.address, None)
        super().close()

    def _stamp(self, slot: int, incarnation: int, version: int) -> None:
        STAMP.pack_into(self._memory, 64 * (1 + slot), incarnation, version)


class Reader(_Slots):
    """Reads versions on an engine's side. before_close: runs while the arena is still mapped."""

    def __init__(self, address: str, segment: Segment, spec: WeightsSpec) -> None:
        super().__init__(address, segment, spec)
        self.before_close = ExitStack()
        expected = MAGIC + spec.digest
        if segment.size < HEADER + SLOTS * self._stride or self._memory[: len(expected)] != expected:
            raise WeightsError(
                f"weight arena {address} was made for another model or dtype than this reader's: start trainer "
                "and engine with the same model folder and model.dtype"
            )

    @property
    def mapping(self) -> tuple[int, int]:
        """Returns address and bytes of the arena in this process."""
        return np.frombuffer(self._memory, np.uint8).ctypes.data, self._segment.size

    def close(self) -> None:
        self.before_close.close()
        super().close()

    @property
    def _memory(self) -> memoryview:
        return super()._memory.toreadonly()

    async def fetch(self, published: Published) -> Fetched:
        """Does nothing: the version is there already."""
        return Fetched()

    def tensors(self, published: Published) -> dict[str, Tensor]:
        """Returns views of the version's tensors in the arena, under every name, aliases included. Never write to them.
        Raises WeightsError when the slot does not hold that version, or its bytes do not match the digest."""
        self.check(published)
        check_digest(self._slot(published.slot), self._spec, published)
        return with_aliases(views(self._slot(published.slot), self._spec), self._spec)

    def check(self, published: Published) -> None:
        """Raises WeightsError unless the slot holds that version completely. A reader that copies checks again."""
        incarnation, version = STAMP.unpack_from(self._memory, 64 * (1 + published.slot))
        if (incarnation, version) != (published.incarnation, published.version):
            held = f"holds version {version} of incarnation {incarnation}"
            raise WeightsError(
                f"slot {published.slot} of {published.arena} {'is being written' if version == BEING_WRITTEN else held}"
                f", not version {published.version} of incarnation {published.incarnation}: it was overwritten without "
                "this reader's lease"
            )


def open_writer(arena_name: str, spec: WeightsSpec, wire: str) -> Writer:
    """Makes an arena. wire: `fleet.wire`; "inproc" keeps it in this process, the others in shared memory. Raises
    ArenaFull when there is too little memory for two slots."""
    size = HEADER + SLOTS * _stride(spec)
    if wire != "inproc":
        return Writer(SHARED_SCHEME + arena_name, Segment.create(arena_name, size), spec)
    address = f"inproc://{arena_name}"
    assert address not in _process_arenas, f"weight arena {address} exists already"
    _process_arenas[address] = Segment.private(size)
    return Writer(address, _process_arenas[address], spec)


def open_reader(published: Published, spec: WeightsSpec) -> Reader:
    """Attaches to the arena of `published`. Raises PeerLost when it is gone with its trainer, WeightsError when trainer
    and reader have different models."""
    address = published.arena
    try:
        shared = address.startswith(SHARED_SCHEME)
        segment = Segment.open(address.removeprefix(SHARED_SCHEME)) if shared else _process_arenas[address]
    except (KeyError, FileNotFoundError) as gone:
        raise PeerLost(f"weight arena {address} is gone: its trainer has ended") from gone
    return Reader(address, segment, spec)


def _stride(spec: WeightsSpec) -> int:
    return -(-spec.size // HEADER) * HEADER
