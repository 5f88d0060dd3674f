"""Encodes values as frames, decodes them, and numbers those of a connection, which sends the row of a prompt once.

    frame 0        number of the message | MessagePack [sizes of all other frames, value]
    frames 1..n    the bytes of arrays of INLINE_BYTES or more, untouched

In the value a list stands for everything that is not a plain scalar or a mapping: [tag, ...], where the tag says list,
tuple, array ([tag, dtype, shape, inline bytes | frame number]) or one of WIRE_TYPES with its fields in order, without
the last ones where they have their defaults. Decoding yields only these, of declared types and sizes; any other bytes
raise WireError. Decoded arrays are read-only views of their frame.
"""

import asyncio
import struct
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from io import BufferedIOBase
from math import prod
from operator import attrgetter
from typing import Any, BinaryIO

import msgpack
import numpy as np
from numpy.typing import NDArray

from asyncrl.concurrency import running_timeout
from asyncrl.errors import DeadlineExceeded, WireError
from asyncrl.lanes.bounded_msgpack import unpacked
from asyncrl.lanes.control.field_checks import field_checks
from asyncrl.lanes.control.wire import HIGH_WATER, LIMIT_BYTES, SEND_DEADLINE, Frame, Frames, Wakeup
from asyncrl.protocols.messages import WIRE_TYPES, Call
from asyncrl.protocols.prompt_row import PackedRow, PromptRow

# Rows of prompts on one connection: the samples of a group are scored in calls of their own, and its row travels
# once.
#
#     sender      SentRows.shorten      leaves out the bytes of a row that was sent before
#     receiver    ReceivedRows.restore  puts them back by the digest of the row
#
# Both sides know the same rows, because they take in the same calls in the same order, and forget the oldest row
# first.


KEPT_BYTES = 16 * 2**20
"""Bytes of rows that a receiver keeps for one connection: 160 rows of 100 kB. A row that it forgot travels again."""

SHORTEST = 256
"""Bytes from which a row is left out: a shorter one costs little more than its digest."""

_NO_BYTES = np.zeros(0, np.uint8)


class _KnownRows:
    """Rows by their digests, each with the size of its bytes, which the sender does not keep."""

    def __init__(self) -> None:
        self._rows: dict[bytes, tuple[int, PackedRow]] = {}
        self._bytes = 0

    def _add(self, size: int, row: PackedRow) -> None:
        if row.digest in self._rows or not SHORTEST <= size <= KEPT_BYTES:
            return
        self._rows[row.digest] = size, row
        self._bytes += size
        while self._bytes > KEPT_BYTES:
            oldest = next(iter(self._rows))
            self._bytes -= self._rows.pop(oldest)[0]


class SentRows(_KnownRows):
    """The rows that the other side knows."""

    def shorten(self, call: Call) -> Call:
        """Returns the call without the bytes of known rows."""
        return _with_args(call, [arg if (row := row_of(arg)) is None else self._shortened(row) for arg in call.args])

    def _shortened(self, row: PackedRow) -> PackedRow:
        return self._rows[row.digest][1] if row.digest in self._rows else row

    def add(self, call: Call) -> None:
        """Takes in a call once it was sent."""
        for row in filter(None, map(row_of, call.args)):
            self._add(len(row.data), PackedRow(row.digest, _NO_BYTES))


class ReceivedRows(_KnownRows):
    """The rows that came, with their bytes."""

    def restore(self, call: Call) -> Call:
        """Returns the call with all bytes. Raises WireError for a row whose bytes the other side has never sent."""
        call = _with_args(call, [self._restored(arg) if type(arg) is PackedRow else arg for arg in call.args])
        for row in filter(None, map(row_of, call.args)):
            self._add(len(row.data), row)
        return call

    def _restored(self, row: PackedRow) -> PackedRow:
        if len(row.data):
            return row
        if row.digest not in self._rows:
            raise WireError(f"a call names the row {row.digest.hex()[:16]} of a prompt, whose bytes never came")
        return self._rows[row.digest][1]


def has_rows(message: Any) -> bool:
    return type(message) is Call and any([type(arg) in (PromptRow, PackedRow) for arg in message.args])


def _with_args(call: Call, args: list[Any]) -> Call:
    return Call(call.call, call.method, tuple(args), call.deadline, call.wants_answer)


def row_of(argument: Any) -> PackedRow | None:
    """Returns the row as it is sent, None for another argument. Raises WireError for a row that cannot be sent."""
    if type(argument) is not PromptRow:
        return argument if type(argument) is PackedRow else None
    try:
        return argument.packed
    except (ValueError, OverflowError, TypeError) as error:
        raise WireError(f"the row of a prompt cannot be sent: {error}") from error


INLINE_BYTES = 256
"""Size under which an array is copied into the header, because a frame of its own costs more than the copy."""

MAX_DEPTH = 64
"""Nesting of lists, mappings and messages; our deepest message, a call with cuts, has 12."""

CONTAINERS = 2**20
ITEMS = 2**23
"""Lists and tables of a message, and items in all of them: a fetch of 16,000 rows has a third of these."""

MAX_DIMENSIONS = 8
DTYPES: tuple[np.dtype[Any], ...] = tuple(np.dtype(name) for name in ("?", "u1", "<i4", "<i8", "<f4", "<f8"))
_LIST = 0
_TUPLE = 1
_ARRAY = 2
_FIRST_TYPE = 3
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_pack = msgpack.Packer(strict_types=True).pack
"""One packer for all messages, because making a packer costs more than packing a small message."""

MAX_PLANS = 256
"""Combinations of field types remembered for each type of message."""


def encode(value: Any, limit_bytes: int = LIMIT_BYTES) -> list[Frame]:
    """Returns the frames of one value. Large arrays are not copied: do not change them until they were sent.

    Raises WireError for a type that cannot be sent, which it names, and for a value of more than `limit_bytes`.
    """
    frames: list[Frame] = []
    tree = _lower(value, frames, 0)
    try:
        header: bytes = _pack([list(map(len, frames)), tree])
    except (OverflowError, ValueError) as error:
        raise WireError(f"{type(value).__name__} cannot be sent: {error}") from error
    size = len(header) + sum(map(len, frames))
    if size > limit_bytes:
        raise WireError(f"{type(value).__name__} has {size} bytes, more than the {limit_bytes} of one message")
    return [header, *frames]


def _lower(value: Any, frames: list[Frame], depth: int) -> Any:
    cls = type(value)
    if cls in _PLAIN:
        return value
    if depth >= MAX_DEPTH:
        raise WireError(f"a value nested deeper than {MAX_DEPTH} cannot be sent")
    if (codec := _CODEC_OF.get(cls)) is not None:
        return codec.lower(value, frames, depth + 1)
    if cls is list or cls is tuple:
        tag = _LIST if cls is list else _TUPLE
        if _PLAIN.issuperset(map(type, value)):
            return [tag, *value]
        return [tag, *[_lower(item, frames, depth + 1) for item in value]]
    if cls is dict:
        return {_key(key): _lower(item, frames, depth + 1) for key, item in value.items()}
    if cls is np.ndarray:
        return _lower_array(value, frames)
    if cls is PromptRow:
        return _lower(row_of(value), frames, depth)
    if isinstance(value, np.generic):
        return _lower(value.item(), frames, depth + 1)
    raise WireError(f"a value of type {cls.__module__}.{cls.__qualname__} cannot be sent: {value!r:.100}")


def _key(key: Any) -> str:
    if type(key) is not str:
        raise WireError(f"keys of a mapping are text, not {type(key).__name__}: {key!r:.100}")
    return key


def _lower_array(array: NDArray[Any], frames: list[Frame]) -> list[Any]:
    if array.dtype not in DTYPES or array.ndim > MAX_DIMENSIONS:
        known = [str(dtype) for dtype in DTYPES]
        raise WireError(f"an array of {array.dtype} {list(array.shape)} cannot be sent; the dtypes that can: {known}")
    head = [_ARRAY, DTYPES.index(array.dtype), list(array.shape)]
    if array.nbytes < INLINE_BYTES:
        return [*head, array.tobytes()]
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    frames.append(flat.data)
    return [*head, len(frames) - 1]


def decode(frames: Sequence[Frame], limit_bytes: int = LIMIT_BYTES) -> Any:
    """Returns the value of these frames. Raises WireError for bytes that `encode` would not have made."""
    lengths = list(map(len, frames))
    if not frames or sum(lengths) > limit_bytes:
        raise WireError(
            f"a message of {len(frames)} frames and {sum(lengths)} bytes; at most {limit_bytes} bytes are accepted"
        )
    sizes, tree = _unpack(frames[0])
    if sizes != lengths[1:]:
        raise WireError("the frames of a message do not have the sizes that its header declares")
    reader = _Reader(frames[1:])
    value = reader.read(tree, 0)
    if reader.expected != len(sizes):
        raise WireError(f"{len(sizes)} frames came, {reader.expected} are used")
    return value


def _unpack(header: Frame) -> tuple[Any, Any]:
    try:
        # By default msgpack bounds everything declared inside by the size of the header.
        top = unpacked(header, CONTAINERS, ITEMS, raw=False, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a header that is no MessagePack: {error!r:.200}") from error
    if type(top) is not list or len(top) != 2:
        raise WireError("a header that is not [sizes, value]")
    return top[0], top[1]


class _Reader:
    """Builds the value of one message. expected: the next frame that an array may name; each is used once, in order."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self._frames = frames
        self.expected = 0

    def read(self, node: Any, depth: int) -> Any:
        if type(node) in _PLAIN:
            return node
        if depth >= MAX_DEPTH:
            raise WireError(f"a value nested deeper than {MAX_DEPTH}")
        if type(node) is dict:
            return {_key(key): self.read(item, depth + 1) for key, item in node.items()}
        if type(node) is not list or not node or type(node[0]) is not int:
            raise WireError("a value without a tag")
        tag = node[0]
        if tag in (_LIST, _TUPLE):
            # A new object: `build` then knows that this field has to be read each time.
            plain = _PLAIN.issuperset(map(type, node))
            items = node[1:] if plain else [self.read(item, depth + 1) for item in node[1:]]
            return items if tag == _LIST else tuple(items)
        if tag == _ARRAY:
            return self._array(node)
        if not _FIRST_TYPE <= tag < _FIRST_TYPE + len(_CODECS):
            raise WireError(f"an unknown tag {tag}")
        return _CODECS[tag - _FIRST_TYPE].build(self, node, depth)

    def _array(self, node: list[Any]) -> NDArray[Any]:
        if len(node) != 4 or type(node[1]) is not int or not 0 <= node[1] < len(DTYPES):
            raise WireError("an array of an unknown dtype")
        dtype = DTYPES[node[1]]
        shape = node[2]
        if type(shape) is not list or len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
            raise WireError(f"an array of shape {shape!r:.100}")
        data = self._bytes(node[3])
        if prod(shape) * dtype.itemsize != len(data):
            raise WireError(f"an array of shape {shape} and {dtype} in {len(data)} bytes")
        try:
            array = np.frombuffer(data, dtype).reshape(shape)
        except (ValueError, OverflowError) as error:
            raise WireError(f"an array of shape {shape}: {error}") from error
        if dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
            raise WireError("an array of bool with other bytes than 0 and 1")
        array.flags.writeable = False
        return array

    def _bytes(self, where: Any) -> Frame:
        if type(where) is bytes:
            return where
        if type(where) is not int or where != self.expected or where >= len(self._frames):
            raise WireError(f"an array in frame {where!r:.100}, where {self.expected} is next")
        self.expected += 1
        return self._frames[where]


def _fields_of(cls: type, names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns the function that gives the fields of a message."""
    if issubclass(cls, tuple):
        return tuple
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda message: (get(message),)


class _MessageCodec:
    """Lowers and builds the messages of one type. Which fields need more than a copy depends on the types of all fields
    alone; a run has few combinations of types, which are remembered (docs/decisions.md)."""

    def __init__(self, tag: int, cls: type) -> None:
        self._tag = tag
        self._cls = cls
        self._checks = field_checks(cls)
        self._fields = _fields_of(cls, [name for name, _ in self._checks])
        self._defaults = [parameter.default for parameter in signature(cls).parameters.values()]
        self._required = self._defaults.count(Parameter.empty)
        self._to_lower: dict[tuple[type, ...], tuple[int, ...]] = {}
        self._to_read: dict[tuple[type, ...], tuple[int, ...]] = {}
        """Types of the nodes of a valid message, its tag first -> fields that differ from their node, because they have
        parts or are an int for a float. Only valid messages are remembered, so entries are few."""

    def lower(self, message: Any, frames: list[Frame], depth: int) -> list[Any]:
        fields = self._fields(message)
        count = len(fields)
        while count > self._required and fields[count - 1] is self._defaults[count - 1]:
            count -= 1
        tree = [self._tag, *fields[:count]]
        types = tuple(map(type, tree))
        plan = self._to_lower.get(types)
        if plan is None:
            plan = tuple(place for place, cls in enumerate(types) if cls not in _PLAIN)
            if len(self._to_lower) < MAX_PLANS:
                self._to_lower[types] = plan
        for place in plan:
            tree[place] = _lower(tree[place], frames, depth)
        return tree

    def build(self, reader: _Reader, node: list[Any], depth: int) -> Any:
        """A plain field is valid by its type alone once a valid message had the same types."""
        types = tuple(map(type, node))
        plan = self._to_read.get(types)
        values = node[1:]
        if not self._required <= len(values) <= len(self._checks):
            raise WireError(f"a {self._cls.__name__} with {len(values)} fields; it has {len(self._checks)}")
        place = 0
        try:
            for place in range(len(values)) if plan is None else plan:
                values[place] = self._checks[place][1](reader.read(values[place], depth + 1))
        except WireError as error:
            raise WireError(f"{self._cls.__name__}.{self._checks[place][0]}: {error}") from error
        if plan is None:
            self._to_read[types] = tuple(place for place, value in enumerate(values) if value is not node[place + 1])
        try:
            return self._cls(*values)
        except ValueError as error:
            raise WireError(f"{self._cls.__name__}: {error}") from error


_CODECS = tuple(_MessageCodec(_FIRST_TYPE + index, cls) for index, cls in enumerate(WIRE_TYPES))
_CODEC_OF = dict(zip(WIRE_TYPES, _CODECS, strict=True))


# ---- values in files: number of frames u32 | length u64 of each | frames; and so on ------------------------------

MOST_FRAMES = 65_536
_COUNT = struct.Struct(">I")
_LENGTH = struct.Struct(">Q")


class EndsEarly(WireError):
    """A file ends in the midst of a value."""


def encode_for_file(value: Any) -> bytes:
    """Returns the bytes that `next_in_file` reads. Raises what `encode` raises."""
    frames = encode(value)
    return b"".join([_COUNT.pack(len(frames)), *(_LENGTH.pack(len(frame)) for frame in frames), *frames])


def next_in_file(file: BufferedIOBase | BinaryIO) -> Any:
    """Returns the next value of a file, None at its end. Raises EndsEarly, and WireError for what is no such file."""
    if not (head := file.read(_COUNT.size)):
        return None
    (count,) = _COUNT.unpack(_whole(head, _COUNT.size))
    if not 0 < count <= MOST_FRAMES:
        raise WireError(f"a value of {count} frames: this is no file of records or rows")
    table = _whole(file.read(count * _LENGTH.size), count * _LENGTH.size)
    lengths = [length for (length,) in _LENGTH.iter_unpack(table)]
    if sum(lengths) > LIMIT_BYTES:
        raise WireError(f"a value of {sum(lengths)} bytes: this is no file of records or rows")
    return decode([_whole(file.read(length), length) for length in lengths])


def _whole(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise EndsEarly(f"a file ends after {len(data)} of {size} bytes")
    return data


# ---- the numbers of a connection's messages ----------------------------------------------------------------------

_NUMBER = struct.Struct("<Q")
"""Number of a message, in the frame of the header: a frame of its own would cost the I/O threads of ZeroMQ more."""


def numbered(number: int, frames: list[Frame]) -> list[Frame]:
    return [b"".join((_NUMBER.pack(number), frames[0])), *frames[1:]]


class MessageSequence:
    """Encodes and numbers what one side sends, and checks the numbers of what it receives, each from 0.

    A message that was lost, repeated or overtaken is thus detected and breaks the connection; the caller asks again in
    a new attempt. offer, room: of the endpoint; receiver: names it when it does not read.
    """

    def __init__(self, offer: Callable[[Frames], bool], room: Wakeup, receiver: str) -> None:
        self.sent = 0
        self.received = 0
        self._offer = offer
        self._room = room
        self._receiver = receiver
        self._order = asyncio.Lock()
        self._sent_rows = SentRows()
        self._received_rows = ReceivedRows()

    async def send(self, message: Any) -> None:
        """Sends, waiting for room. Raises WireError (nothing was sent), PeerLost, DeadlineExceeded."""
        if self.offer(message):
            return
        async with self._order:
            frames = self._encode(message)  # Nothing else is sent from here on, so the receiver learns of no other row.
            try:
                async with running_timeout(SEND_DEADLINE):
                    while not self._offer_frames(message, frames):
                        await self._room.wait()
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"{self._receiver} has not read for {SEND_DEADLINE:g} s: its queue of {HIGH_WATER} messages is full"
                ) from error

    def offer(self, message: Any) -> bool:
        """Sends without waiting; returns False when the queue is full or others wait for it."""
        return not self._order.locked() and self._offer_frames(message, self._encode(message))

    def _encode(self, message: Any) -> list[Frame]:
        return encode(self._sent_rows.shorten(message) if has_rows(message) else message)

    def _offer_frames(self, message: Any, frames: list[Frame]) -> bool:
        if not self._offer(numbered(self.sent, frames)):
            return False
        self.sent += 1
        if has_rows(message):
            self._sent_rows.add(message)
        return True

    def accept(self, frames: list[Frame], limit_bytes: int = LIMIT_BYTES) -> Any:
        """Returns the message in these frames. Raises WireError for invalid bytes and for a gap in the numbers."""
        if not frames or len(frames[0]) < _NUMBER.size:
            raise WireError("a message without a number")
        (number,) = _NUMBER.unpack_from(frames[0])
        if number != self.received:
            raise WireError(f"a gap: message {number} came where {self.received} was next")
        self.received += 1
        frames[0] = frames[0][_NUMBER.size :]
        message = decode(frames, limit_bytes)
        return self._received_rows.restore(message) if has_rows(message) else message
