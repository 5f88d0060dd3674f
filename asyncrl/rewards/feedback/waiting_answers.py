"""Holds the answers that wait for a person, and hands each rating to its sample once it is on disk.

FeedbackService: value(answer) ──> waiting ──> page ──> rate / pick ──> ratings.jsonl ──> value returns
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.rewards.feedback.pairs import EQUAL, Judgement, RatableAnswer, values_of_line
from asyncrl.telemetry.jsonl import LineFile, read_lines

# Keeps every rating in `ratings.jsonl` of the run directory: on disk first, then known.
#
# Three kinds of lines: a `rating` of one answer, a `pick` between two, and `late` for the name of an answer whose
# rating became no reward because its sample came again with another text.


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


KNOWN_ANSWERS = 4096
"""Answers that no longer wait and may still be rated, the newest: what a person sees on an open page, many times over.
Those that wait are bounded by the gate."""


class UnknownAnswer(LookupError):
    """Reports a rating of an answer that nobody was asked about, or long ago."""


class RatedBefore(ValueError):
    """Reports a rating of an answer that has another one."""


@dataclass(eq=False, slots=True)
class WaitingAnswer:
    """An answer whose sample waits. value: resolves with the rating, or None when the wait ends without one. useful_to:
    newest version of the policy that may still train on the sample. attempt: newest one of its group in which it was
    sampled. waits: calls that wait for it."""

    answer: RatableAnswer
    useful_to: float
    value: "asyncio.Future[float | None]"
    attempt: int = 0
    waits: int = 0


@dataclass(eq=False, slots=True)
class FeedbackBoard:
    """Matches ratings with answers. file: is open. rated: answers that got their value so far. unrated: those whose
    wait ended without one. members: answers of a group, where they are compared with each other; else 0."""

    file: RatingsFile
    rated: int = 0
    unrated: int = 0
    members: int = 0
    _waiting: dict[str, WaitingAnswer] = field(default_factory=dict)
    _known: OrderedDict[str, RatableAnswer] = field(default_factory=OrderedDict)
    _deciding: asyncio.Lock = field(default_factory=asyncio.Lock)
    _newest: int = 0
    _left: OrderedDict[int, dict[int, int]] = field(default_factory=OrderedDict)
    """Group -> member whose wait has ended -> its attempt. Groups are as many as `KNOWN_ANSWERS`."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def value(self, answer: RatableAnswer, useful_to: float, seconds: float, attempt: int = 0) -> float | None:
        """Returns the value of an answer once a person rated it, at once if that was before; None after `seconds`, or
        when the policy is past the version `useful_to`, or when no answer is left that it could be compared with.
        attempt: of the group, in which it was sampled."""
        name = answer.id
        if (known := self.file.value(name)) is None:
            await self.file.note_other_text(answer)
            known = await self._wait(answer, useful_to, seconds, attempt)
        await self._leave(answer, attempt)
        self.rated += known is not None
        self.unrated += known is None
        return known

    async def _wait(self, answer: RatableAnswer, useful_to: float, seconds: float, attempt: int) -> float | None:
        if useful_to < self._newest or self._is_alone(answer, attempt):
            return None
        waiting = self._waiting.get(answer.id)
        if waiting is None:
            waiting = WaitingAnswer(answer, useful_to, asyncio.get_running_loop().create_future())
            self._waiting[answer.id] = waiting
        waiting.attempt = max(waiting.attempt, attempt)
        waiting.waits += 1
        try:
            try:
                async with asyncio.timeout(seconds):
                    return await asyncio.shield(waiting.value)
            except TimeoutError:
                async with self._deciding:  # A rating that is being written counts.
                    return waiting.value.result() if waiting.value.done() else None
        finally:
            waiting.waits -= 1
            if not waiting.waits and self._waiting.get(answer.id) is waiting:
                del self._waiting[answer.id]
                self._know(answer)

    def _know(self, answer: RatableAnswer) -> None:
        self._known[answer.id] = answer
        while len(self._known) > KNOWN_ANSWERS:
            self._known.popitem(last=False)

    async def _leave(self, answer: RatableAnswer, attempt: int) -> None:
        """Ends the wait of an answer that could have been compared only with those that wait no longer."""
        if not self.members:
            return
        left = self._left.setdefault(answer.group, {})
        left[answer.member] = max(left.get(answer.member, 0), attempt)
        while len(self._left) > KNOWN_ANSWERS:
            self._left.popitem(last=False)
        if len(left) < self.members - 1:
            return
        async with self._deciding:  # A pick that is being written counts.
            for waiting in self._waiting.values():
                alone = waiting.answer.group == answer.group and self._is_alone(waiting.answer, waiting.attempt)
                if alone and not waiting.value.done():
                    waiting.value.set_result(None)

    def _is_alone(self, answer: RatableAnswer, attempt: int) -> bool:
        """Returns whether every other member of a group has left; who left in an earlier attempt may come again."""
        left = self._left.get(answer.group, {})
        gone = [member for member, last in left.items() if member != answer.member and last >= attempt]
        return bool(self.members) and len(gone) >= self.members - 1

    async def version_seen(self, version: int) -> None:
        """Ends the wait of answers that no later version may train on, once a newer version has sampled."""
        if version <= self._newest:
            return
        self._newest = version
        async with self._deciding:  # A rating that is being written counts.
            for waiting in self._waiting.values():
                if waiting.useful_to < version and not waiting.value.done():
                    waiting.value.set_result(None)

    # ---- asking ------------------------------------------------------------------------------------------

    def unanswered(self) -> Iterator[RatableAnswer]:
        """Yields the answers that wait for a rating, the oldest first."""
        return (each.answer for each in self._waiting.values() if not each.value.done())

    def pairs(self) -> Iterator[tuple[RatableAnswer, RatableAnswer]]:
        """Yields pairs of answers of one prompt that wait; each answer is in one pair at most."""
        single: dict[int, RatableAnswer] = {}
        for answer in self.unanswered():
            other = single.pop(answer.group, None)
            if other is None:
                single[answer.group] = answer
            else:
                yield other, answer

    # ---- answering ---------------------------------------------------------------------------------------

    async def rate(self, name: str, value: float) -> Judgement:
        """Takes the value of one answer; returns once it is on disk. Raises UnknownAnswer, RatedBefore, and OSError
        with nothing kept when it could not be written."""
        return await self._decide((name,), (value,))

    async def pick(self, chosen: str, other: str, equal: bool = False) -> Judgement:
        """Takes which of two answers to one prompt is better: 1 for it and 0 for the other, or EQUAL for each. Raises
        as `rate` does, and UnknownAnswer for answers to different prompts."""
        if chosen == other:
            raise UnknownAnswer(f"{chosen} cannot be compared with itself: name two answers")
        return await self._decide((chosen, other), (EQUAL, EQUAL) if equal else (1.0, 0.0))

    async def skip(self, names: Sequence[str]) -> None:
        """Ends the wait for answers that a person does not want to rate, as if their time were over. Raises
        UnknownAnswer."""
        async with self._deciding:
            for answer in [self._answer(name) for name in names]:
                if self._waits(answer.id):
                    self._waiting[answer.id].value.set_result(None)

    async def _decide(self, names: Sequence[str], values: tuple[float, ...]) -> Judgement:
        async with self._deciding:
            if self.file.holds(dict(zip(names, values, strict=True))):
                # The same once more, from a client that did not hear of the first, perhaps of an earlier worker.
                return Judgement((), values, late=not any(map(self.file.is_reward, names)))
            for name in names:
                if (value := self.file.value(name)) is not None:
                    raise RatedBefore(f"{name} was rated {value:g} before, and the first rating counts")
            answers = tuple(self._answer(name) for name in names)
            if len({repr(answer.prompt) for answer in answers}) > 1:
                raise UnknownAnswer(f"{' and '.join(names)} are answers to different prompts, which are not compared")
            judgement = Judgement(answers, values, late=not any(map(self._waits, names)))
            await self.file.add(judgement)
            for name, value in zip(names, values, strict=True):
                if self._waits(name):
                    self._waiting[name].value.set_result(value)
            return judgement

    def _answer(self, name: str) -> RatableAnswer:
        if (waiting := self._waiting.get(name)) is not None:
            return waiting.answer
        if (found := self._known.get(name)) is None:
            raise UnknownAnswer(
                f"no answer is known as {name[:80]!r}: it was never asked about here, or long ago, or the worker that "
                "asked was started again; ask for the answers that wait now"
            )
        return found

    def _waits(self, name: str) -> bool:
        return name in self._waiting and not self._waiting[name].value.done()
