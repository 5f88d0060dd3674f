"""Records what crosses the lanes of one worker: calls and their answers, rows that were read, and rows that were kept.

    call ──> ("call", number, method, arguments)            rows read ──> ("read", names, columns, rows)
    answer ──> ("answer", number, value, digests)            rows kept ──> ("kept", name, row)
    error ──> ("failed", number, class, text)

Each file begins with ("worker", specification as JSON).
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from asyncrl.lanes.control.message_codec import EndsEarly, encode_for_file, next_in_file
from asyncrl.lanes.control.server import Dispatch
from asyncrl.lanes.data.row_reader import Cells, RowReader
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column, SampleName
from asyncrl.protocols.messages import Call

# Files of records, RUN_DIR/recorded/INSTANCE.0000 and so on, are appended by a thread, with a bound on their bytes.
#
# When the files of a worker, of all its instances, would exceed the bound, the oldest is removed; each begins with
# the same record. A file that its process did not finish ends in the midst of a record, which readers leave out.


FILES = 8
"""Files of a worker at its bound: with the oldest, an eighth of what is known is forgotten."""
MOST_WAITING = 64 << 20
"""Bytes that may wait for the disk; calls are answered later when there are more."""


class RecordFiles:
    """Appends records to the files of one instance.

    folder: of all recordings of a run. most_bytes: of the files of its worker. first: begins each file. failure:
    why nothing is recorded any more, such as a full disk; "" while it goes on.
    """

    def __init__(self, folder: Path, instance: str, most_bytes: int, first: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.failure = ""
        self._folder = folder
        self._instance = instance
        self._most_bytes = most_bytes
        self._first = encode_for_file(first)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recording")
        self._waiting = 0
        self._room = asyncio.Event()
        self._number = 0
        self._file = self._opened()

    def append(self, value: Any) -> None:
        """Takes a record without waiting for the disk. Arrays of the value are copied."""
        if self.failure:
            return
        data = encode_for_file(value)
        self._waiting += len(data)
        loop = asyncio.get_running_loop()
        self._thread.submit(self._write, data).add_done_callback(
            lambda done: loop.call_soon_threadsafe(self._note_written, len(data), done.exception())
        )

    async def drained(self, deadline: float) -> None:
        """Waits while more than MOST_WAITING bytes wait for the disk, for so many seconds at most; records that come
        later than that are lost, and `failure` says so."""
        try:
            async with asyncio.timeout(deadline):
                while self._waiting > MOST_WAITING and not self.failure:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            self.failure = f"the disk took no record within {deadline:g} s"

    def close(self) -> None:
        """Writes what was appended."""
        self._thread.shutdown()
        self._file.close()

    def _note_written(self, size: int, error: BaseException | None) -> None:
        self._waiting -= size
        if error is not None and not self.failure:
            self.failure = str(error)
        self._room.set()

    def _write(self, data: bytes) -> None:
        if self._file.tell() > len(self._first) and self._file.tell() + len(data) > self._most_bytes // FILES:
            self._file.close()
            self._number += 1
            self._file = self._opened()
        self._file.write(data)
        self._file.flush()

    def _opened(self) -> BinaryIO:
        """Opens the next file, after the oldest ones of this worker have left room for it."""
        worker = self._instance.partition("-")[0]
        sizes = {path: path.stat() for path in self._folder.glob(f"{worker}-*.[0-9]*")}
        left = sum(each.st_size for each in sizes.values()) + self._most_bytes // FILES - self._most_bytes
        for path in sorted(sizes, key=lambda path: sizes[path].st_mtime_ns):
            if left > 0:
                left -= sizes[path].st_size
                path.unlink()
        file = (self._folder / f"{self._instance}.{self._number:04}").open("wb")
        file.write(self._first)
        file.flush()
        return file


def is_whole(folder: Path, instance: str) -> bool:
    """Returns whether no file of an instance was removed."""
    return (folder / f"{instance}.0000").exists()


def recorded_instances(folder: Path) -> list[str]:
    """Returns the instances of which there are records, in the order of their first files' names."""
    return sorted({path.name.rpartition(".")[0] for path in folder.glob("*.[0-9]*")})


def read_records(folder: Path, instance: str) -> Iterator[Any]:
    """Yields the records of an instance in order. Raises WireError for a file that holds something else."""
    for path in sorted(folder.glob(f"{instance}.[0-9]*")):
        with path.open("rb") as file, suppress(EndsEarly):
            while (record := next_in_file(file)) is not None:
                yield record


REPLAYED: Mapping[str, tuple[str, ...]] = {
    "training": ("prefetch", "step", "release"),
    **dict.fromkeys(("critic", "cost_critic"), ("values", "update", "release")),
    **dict.fromkeys(("reward", "cost"), ("score", "release")),
    "reference": ("logprobs", "release"),
}
"""Service -> calls that make it what it is, and are recorded. Generation follows from the weights, which are not."""

LEARNING = ("step", "update")
"""Calls that change tensors."""

DISK_DEADLINE = 60.0
"""Seconds that a disk may take nothing; then recording ends and the run goes on."""

Digests = Callable[[], Awaitable[Mapping[str, tuple[str, float]]]]
"""Returns digest and norm of each tensor that a call may have changed."""


@dataclass(eq=False)
class LaneRecorder:
    """Numbers calls, and appends records to files."""

    files: RecordFiles
    _calls: Iterator[int] = field(default_factory=count)

    def read(self, refs: BatchRef, columns: Sequence[str], rows: Batch) -> None:
        self.files.append(("read", [list(row.name) for row in refs], list(columns), rows))

    def kept(self, sample: SampleName, columns: Mapping[str, Array]) -> None:
        row = Batch({name: Column.of([values]) for name, values in columns.items()})
        self.files.append(("kept", list(sample), row))

    def around(self, dispatch: Dispatch, methods: Sequence[str], digests: Digests) -> Dispatch:
        """Returns what runs the same calls and records those of these methods."""
        return lambda call: self._recorded(call, dispatch, digests) if call.method in methods else dispatch(call)

    async def _recorded(self, call: Call, dispatch: Dispatch, digests: Digests) -> Any:
        number = next(self._calls)
        answering = dispatch(call)
        assert isinstance(answering, Awaitable), "streams are not recorded"
        self.files.append(("call", number, call.method, list(call.args)))
        try:
            answer = await answering
        finally:
            if isinstance(error := sys.exc_info()[1], Exception):  # Not a call that was cancelled: it has no outcome.
                self.files.append(("failed", number, type(error).__name__, str(error)))
        changed = await digests() if call.method in LEARNING else {}
        found = {name: list(each) for name, each in changed.items()}
        self.files.append(("answer", number, answer, found))
        await self.files.drained(DISK_DEADLINE)
        return answer


@dataclass(eq=False)
class RecordingReader(RowReader):
    """Reads rows as every reader does, and records them."""

    _: KW_ONLY
    recorder: LaneRecorder

    async def read(self, refs: BatchRef, columns: Sequence[str]) -> Batch:
        rows = await super().read(refs, columns)
        self.recorder.read(refs, columns, rows)
        return rows

    @asynccontextmanager
    async def views(self, refs: BatchRef, columns: Sequence[str]) -> AsyncIterator[Cells]:
        async with super().views(refs, columns) as cells:
            self.recorder.read(refs, columns, Batch({name: Column.of(list(cells[name])) for name in columns}))
            yield cells
