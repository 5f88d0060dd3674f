"""Keeps every rating in `ratings.jsonl` of the run directory: on disk first, then known.

Three kinds of lines: a `rating` of one answer, a `pick` between two, and `late` for the name of an answer whose rating
became no reward because its sample came again with another text.
"""

import asyncio
import time
from collections import OrderedDict
from pathlib import Path

from asyncrl.rewards.feedback.ratable_answers import Judgement, RatableAnswer, values_of_line
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
        self._judgements: OrderedDict[str, dict[str, float]] = OrderedDict()
        """Names of answers -> the values of all answers of the judgement that is on disk."""
        self._rewards: dict[str, tuple[str, ...]] = {}
        """Judgements that are rewards, by members of groups: "group.member" -> names of all answers of a judgement."""
        self.ratings = 0
        self.late = 0

    async def open(self) -> None:
        """Reads what is on disk; a torn last line, which nobody was told is kept, is cut."""
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        for line in read_lines(self._path):
            if values := values_of_line(line):
                self._count(dict(values), late=line["late"])
            elif line.get("kind") == "late":
                self._outdate(line["sample"])
        self._file = LineFile(self._path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def value(self, name: str) -> float | None:
        """Returns what a person gave the answer of this name, if it was rated."""
        return self._judgements.get(name, {}).get(name)

    def holds(self, values: dict[str, float]) -> bool:
        """Returns whether one judgement on disk gives these values to the answers of these names, and to no others."""
        return all(self._judgements.get(name) == values for name in values)

    def is_reward(self, name: str) -> bool:
        """Returns whether the rating of an answer is the reward of its sample."""
        return name in self._rewards.get(_member(name), ())

    async def add(self, judgement: Judgement) -> None:
        """Returns once the judgement is on disk. Raises OSError, with nothing kept, when it could not be written."""
        await self._append(judgement.line(time.time()))
        names = [answer.id for answer in judgement.answers]
        self._count(dict(zip(names, judgement.values, strict=True)), judgement.late)

    async def note_other_text(self, answer: RatableAnswer) -> None:
        """Keeps that the sample of a rating came again with another text, so that the rating is not its reward."""
        member = _member(answer.id)
        for rated in self._rewards.get(member, ()):
            if _member(rated) == member and rated != answer.id:
                self._outdate(rated)
                await self._append({"kind": "late", "sample": rated})

    async def _append(self, line: dict[str, object]) -> None:
        assert self._file is not None, "`open` comes first"
        async with self._writing:
            await asyncio.to_thread(self._file.append_synced, line)

    def _count(self, values: dict[str, float], late: bool) -> None:
        """Takes a judgement that is on disk. values: by names of answers."""
        self.ratings += 1
        self.late += late
        for name in values:
            self._judgements[name] = values
            if not late:
                self._rewards[_member(name)] = tuple(values)
        while len(self._judgements) > REMEMBERED:
            forgotten, _ = self._judgements.popitem(last=False)
            if self.is_reward(forgotten):
                del self._rewards[_member(forgotten)]

    def _outdate(self, name: str) -> None:
        """Takes an answer whose rating is no reward. A judgement is late when that is so for all of its answers."""
        names = self._rewards.pop(_member(name), ())
        self.late += bool(names) and not any(map(self.is_reward, names))


def _member(name: str) -> str:
    """Returns "group.member" of the name of an answer."""
    return name.rpartition(".")[0]
