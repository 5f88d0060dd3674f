"""Keeps every rating in `ratings.jsonl` of the run directory: on disk first, then known.

Three kinds of lines: a `rating` of one answer, a `pick` between two, and `late` for the name of an answer whose rating
became no reward because its sample came again with another text.
"""

import asyncio
import time
from collections import OrderedDict
from pathlib import Path

from asyncrl.rewards.feedback.answers import Judgement, RatableAnswer, values_of_line
from asyncrl.telemetry.jsonl import LineFile, read_lines

REMEMBERED = 100_000
"""Rated answers whose values are remembered, the newest: far more than can be in flight when a run resumes."""


class RatingsFile:
    """Appends ratings and remembers their values, also those that an earlier worker or start of the run wrote.

    ratings: number of ratings and picks on disk. late: number of them that are no reward of a sample.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: LineFile | None = None
        self._writing = asyncio.Lock()
        self._values: OrderedDict[str, float] = OrderedDict()
        self._rated_text: dict[str, str] = {}
        """Rated answer of each member of a group: "group.member" -> name of the answer."""
        self.ratings = 0
        self.late = 0

    async def open(self) -> None:
        """Reads what is on disk; a torn last line, which nobody was told is kept, is cut."""
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        for line in read_lines(self._path):
            values = values_of_line(line)
            self.ratings += bool(values)
            self.late += line.get("late", line.get("kind") == "late")
            for name, value in values:
                self._remember(name, value)
        self._file = LineFile(self._path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def value(self, name: str) -> float | None:
        """Returns what a person gave the answer of this name, if it was rated."""
        return self._values.get(name)

    async def add(self, judgement: Judgement) -> None:
        """Returns once the judgement is on disk. Raises OSError, with nothing kept, when it could not be written."""
        await self._append(judgement.line(time.time()))
        self.ratings += 1
        self.late += judgement.late
        for answer, value in zip(judgement.answers, judgement.values, strict=True):
            self._remember(answer.id, value)

    async def note_other_text(self, answer: RatableAnswer) -> None:
        """Counts a rating as late when the sample that it was given to comes again with another text."""
        member = answer.id.rpartition(".")[0]
        rated = self._rated_text.get(member, answer.id)
        if rated != answer.id:
            del self._rated_text[member]
            await self._append({"kind": "late", "sample": rated})
            self.late += 1

    async def _append(self, line: dict[str, object]) -> None:
        assert self._file is not None, "`open` comes first"
        async with self._writing:
            await asyncio.to_thread(self._file.append_synced, line)

    def _remember(self, name: str, value: float) -> None:
        self._values[name] = value
        self._rated_text[name.rpartition(".")[0]] = name
        if len(self._values) > REMEMBERED:
            forgotten, _ = self._values.popitem(last=False)
            member = forgotten.rpartition(".")[0]
            if self._rated_text.get(member) == forgotten:
                del self._rated_text[member]
