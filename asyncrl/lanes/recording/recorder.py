"""Records what crosses the lanes of one worker: calls and their answers, rows that were read, and rows that were kept.

    call ──> ("call", number, method, arguments)            rows read ──> ("read", names, columns, rows)
    answer ──> ("answer", number, value, digests)            rows kept ──> ("kept", name, row)
    error ──> ("failed", number, class, text)

Each file begins with ("worker", specification as JSON).
"""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import Any

from asyncrl.lanes.control.server import Dispatch
from asyncrl.lanes.data.row_fetcher import Cells
from asyncrl.lanes.data.row_reader import RowReader
from asyncrl.lanes.recording.record_files import RecordFiles
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column, SampleName
from asyncrl.protocols.messages import Call

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
        number, answering = next(self._calls), dispatch(call)
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
