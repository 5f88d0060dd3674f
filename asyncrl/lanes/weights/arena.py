"""The two-slot weight arena: the trainer copies a version into the idle slot, engines read it in place.

    0          64             128            4096                4096 + stride
    | magic,   | stamp of     | stamp of     | slot 0: tensors   | slot 1: tensors   |
    | digest   | slot 0       | slot 1       |                   |                   |

A stamp is (incarnation, version) of a complete slot, and marks a slot that is being written. A reader that copies thus
sees whether it copied one version. Readers that read in place also hold a lease (leases.py). The slots may lie apart
from the header: device_arena.py has them on a GPU.
"""

import struct
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np
from torch import Tensor

from asyncrl.errors import PeerLost, WeightsError
from asyncrl.lanes.shared_memory import SHARED_SCHEME, Segment
from asyncrl.lanes.weights.leases import Fetched, Leases, slot_of
from asyncrl.lanes.weights.slot_memory import (
    WeightsSpec,
    block_over,
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


class Writer:
    """Implements WeightSender: writes versions into two slots in turn. block: uint8, both slots. beside: runs copies of
    a version. leases: when a version may be written.

    Invariant: a slot has the stamp of a version only while it holds it completely.
    """

    def __init__(
        self,
        address: str,
        header: Segment,
        block: Tensor,
        spec: WeightsSpec,
        magic: bytes = MAGIC,
        beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.address = address
        self.leases = Leases()
        self._header = header
        self._spec = spec
        self._beside = beside
        self._slots = slots_in(block, spec)
        self._tensors = [views(slot, spec) for slot in self._slots]
        for slot in range(SLOTS):
            self._stamp(slot, BEING_WRITTEN, BEING_WRITTEN)
        header.buffer[: len(magic) + len(spec.digest)] = magic + spec.digest

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
        digest_of = digested_tensor(self._spec, version)
        with self._beside():
            fill(self._tensors[slot], tensors)
            found = digest(self._slots[slot], self._spec, digest_of)  # Of a device it reads back: all copies are done.
        self._stamp(slot, incarnation, version)
        self.leases.end_write(version)
        return Published(incarnation, version, self.address, slot, found, digest_of)

    def forget(self, reader: str) -> None:
        self.leases.detach(reader)

    def close(self) -> None:
        """Removes the name; views that readers have stay valid. Memory of a device goes with this process: freed
        before, readers would read what is undefined."""
        self._tensors = []
        self._slots = []
        self._header.unlink()
        _process_arenas.pop(self.address, None)
        self._header.close()

    def _stamp(self, slot: int, incarnation: int, version: int) -> None:
        STAMP.pack_into(self._header.buffer, 64 * (1 + slot), incarnation, version)


class Reader:
    """Implements WeightReceiver: reads versions in place. block: uint8, both slots. before_first: runs before the first
    tensors, on their thread; before_close: while the arena is still mapped."""

    def __init__(
        self, address: str, header: Segment, block: Tensor, spec: WeightsSpec, *, reopens: bool = True
    ) -> None:
        self.address = address
        self.reopens = reopens
        self.before_first: Callable[[Reader], None] | None = None
        self.before_close = ExitStack()
        self._header = header
        self._spec = spec
        self._slots = slots_in(block, spec)

    @property
    def mapping(self) -> tuple[int, int]:
        """Returns address and bytes of the arena in this process."""
        return np.frombuffer(self._header.buffer, np.uint8).ctypes.data, self._header.size

    async def fetch(self, published: Published) -> Fetched:
        """Does nothing: the version is there already."""
        return Fetched()

    def tensors(self, published: Published) -> dict[str, Tensor]:
        """Returns views of the version's tensors, under every name, aliases included. Never write to them. Of a device
        comparing the digest reads bytes back, after all that this thread has enqueued: no step with the version before
        goes on then, and its slot may be written. Raises WeightsError when the slot does not hold that version, or its
        bytes do not match the digest."""
        if self.before_first is not None:
            self.before_first(self)
            self.before_first = None
        self.check(published)
        block = self._slots[published.slot]
        check_digest(block, self._spec, published)
        return with_aliases(views(block, self._spec), self._spec)

    def check(self, published: Published) -> None:
        """Raises WeightsError unless the slot holds that version completely. A reader that copies checks again."""
        incarnation, version = STAMP.unpack_from(self._header.buffer, 64 * (1 + published.slot))
        if (incarnation, version) != (published.incarnation, published.version):
            held = f"holds version {version} of incarnation {incarnation}"
            raise WeightsError(
                f"slot {published.slot} of {published.arena} {'is being written' if version == BEING_WRITTEN else held}"
                f", not version {published.version} of incarnation {published.incarnation}: it was overwritten without "
                "this reader's lease"
            )

    def close(self) -> None:
        """Unmaps the arena; views that were returned stay valid."""
        self.before_close.close()
        self._slots = []
        self._header.close()


def open_writer(arena_name: str, spec: WeightsSpec, wire: str) -> Writer:
    """Makes an arena. wire: `fleet.wire`; "inproc" keeps it in this process, the others in shared memory. Raises
    ArenaFull when there is too little memory for two slots."""
    size = HEADER + bytes_of_slots(spec)
    if wire != "inproc":
        address = SHARED_SCHEME + arena_name
        segment = Segment.create(arena_name, size)
    else:
        address = f"inproc://{arena_name}"
        assert address not in _process_arenas, f"weight arena {address} exists already"
        segment = _process_arenas[address] = Segment.private(size)
    return Writer(address, segment, block_over(segment.buffer[HEADER:]), spec)


def open_reader(published: Published, spec: WeightsSpec) -> Reader:
    """Attaches to the arena of `published`. Raises PeerLost when it is gone with its trainer, WeightsError when trainer
    and reader have different models."""
    segment = open_header(published, spec, MAGIC, SHARED_SCHEME)
    return Reader(published.arena, segment, block_over(segment.buffer[HEADER:]), spec)


def open_header(published: Published, spec: WeightsSpec, magic: bytes, scheme: str) -> Segment:
    """Maps the header of an arena. Raises what `open_reader` raises."""
    address = published.arena
    try:
        named = address.startswith(scheme)
        segment = Segment.open(address.removeprefix(scheme)) if named else _process_arenas[address]
    except (KeyError, FileNotFoundError) as gone:
        raise PeerLost(f"weight arena {address} is gone: its trainer has ended") from gone
    expected = magic + spec.digest
    if segment.buffer[: len(expected)] != expected:
        raise WeightsError(
            f"weight arena {address} was made for another model or dtype than this reader's: start trainer "
            "and engine with the same model folder and model.dtype"
        )
    return segment


def bytes_of_slots(spec: WeightsSpec) -> int:
    return SLOTS * _stride(spec)


def slots_in(block: Tensor, spec: WeightsSpec) -> list[Tensor]:
    stride = _stride(spec)
    return [block[slot * stride : slot * stride + spec.size] for slot in range(SLOTS)]


def _stride(spec: WeightsSpec) -> int:
    return -(-spec.size // HEADER) * HEADER
