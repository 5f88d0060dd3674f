"""The board: answers wait, ratings reach them once they are on disk, and nothing that was said is lost."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.concurrency import gather
from asyncrl.rewards.feedback.pairs import Judgement, RatableAnswer
from asyncrl.rewards.feedback.waiting_answers import FeedbackBoard, RatedBefore, RatingsFile, UnknownAnswer
from tests import golden

Opened = Callable[[], Awaitable[FeedbackBoard]]
FOREVER = float("inf")
SECONDS = 10.0


def answer(text: str = "hello", member: int = 0, group: int = 3, prompt: str = "hi") -> RatableAnswer:
    return RatableAnswer(group, member, prompt, text)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Opens a board on the ratings of this test, as each start of a worker does."""
    boards: list[FeedbackBoard] = []

    async def start() -> FeedbackBoard:
        boards.append(FeedbackBoard(RatingsFile(tmp_path / "ratings.jsonl")))
        await boards[-1].file.open()
        return boards[-1]

    yield start
    for board in boards:
        board.file.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ratings.jsonl").read_text().splitlines()]


async def asked(board: FeedbackBoard, *answers: RatableAnswer) -> list["asyncio.Task[float | None]"]:
    """Returns the waits for these answers, which have begun."""
    waits = [asyncio.ensure_future(board.value(each, FOREVER, SECONDS)) for each in answers]
    for _ in range(3):
        await asyncio.sleep(0)
    assert board.waiting == len(answers)
    return waits


async def test_a_rating_is_on_disk_before_it_is_a_reward(opened: Opened, tmp_path: Path) -> None:
    board = await opened()
    (wait,) = await asked(board, answer())
    seen: list[int] = []
    wait.add_done_callback(lambda _: seen.append(len(lines(tmp_path))))
    judgement = await board.rate(answer().id, 0.75)
    assert (await wait, judgement.late, seen, board.waiting) == (0.75, False, [1], 0)
    (line,) = lines(tmp_path)
    assert (line["kind"], line["prompt"], line["late"]) == ("rating", "hi", False)
    assert line["answers"] == [{"sample": answer().id, "text": "hello", "value": 0.75, "finish": "stop", "tokens": []}]


@pytest.mark.parametrize("skipped", [(0,), (1,), (0, 1)])
async def test_the_run_waits_no_longer_for_an_answer_that_is_skipped(
    opened: Opened, tmp_path: Path, skipped: tuple[int, ...]
) -> None:
    board = await opened()
    answers = [answer("one"), answer("two", member=1)]
    waits = await asked(board, *answers)
    await board.skip([answers[number].id for number in skipped])
    assert [await waits[number] for number in skipped] == [None] * len(skipped)
    assert board.waiting == 2 - len(skipped)
    assert (board.unrated, board.rated, lines(tmp_path)) == (len(skipped), 0, [])
    await board.skip([answers[number].id for number in skipped])  # Another page that shows it skips it too.
    with pytest.raises(UnknownAnswer):
        await board.skip(["nobody's"])
    for number in {0, 1}.difference(skipped):
        await board.rate(answers[number].id, 0.5)
        assert await waits[number] == 0.5


async def test_a_rating_that_cannot_be_written_is_no_reward(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = await opened()
    (wait,) = await asked(board, answer())
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing_disk)
        with pytest.raises(OSError, match="no space"):
            await board.rate(answer().id, 1.0)
    assert (lines(tmp_path), wait.done(), board.file.ratings) == ([], False, 0)
    await board.rate(answer().id, 0.25)
    assert await wait == 0.25


def failing_disk(number: int) -> None:
    raise OSError(28, "no space left")


async def test_a_pick_gives_one_and_zero_and_equal_gives_half(opened: Opened, tmp_path: Path) -> None:
    board = await opened()
    members = [answer(text, number) for number, text in enumerate("abcd")]
    waits = await asked(board, *members)
    assert [[each.text for each in pair] for pair in board.pairs()] == [["a", "b"], ["c", "d"]]
    await board.pick(members[1].id, members[0].id)
    await board.pick(members[2].id, members[3].id, equal=True)
    assert [await wait for wait in waits] == [0.0, 1.0, 0.5, 0.5]
    assert [line["kind"] for line in lines(tmp_path)] == ["pick", "pick"]


async def test_the_first_rating_counts_and_the_same_one_again_is_no_second(opened: Opened, tmp_path: Path) -> None:
    board = await opened()
    (wait,) = await asked(board, answer())
    name = answer().id
    results = await gather(board.rate(name, 1.0), board.rate(name, 1.0))
    assert [(result.values, result.late) for result in results] == [((1.0,), False)] * 2
    with pytest.raises(RatedBefore, match="rated 1 before"):
        await board.rate(name, 0.0)
    assert (await wait, len(lines(tmp_path)), board.file.ratings) == (1.0, 1, 1)


async def test_a_pick_of_answers_that_were_rated_apart_is_refused_and_a_rating_of_a_picked_one_too(
    opened: Opened, tmp_path: Path
) -> None:
    board = await opened()
    members = [answer(text, number) for number, text in enumerate("abcd")]
    waits = await asked(board, *members)
    first, second, better, worse = (member.id for member in members)
    await board.rate(first, 1.0)
    await board.rate(second, 0.0)
    with pytest.raises(RatedBefore, match="rated 1 before"):
        await board.pick(first, second)
    await board.pick(better, worse)
    with pytest.raises(RatedBefore, match="rated 1 before"):
        await board.rate(better, 1.0)
    board.file.close()
    again = await opened()
    with pytest.raises(RatedBefore):
        await again.pick(first, second)
    assert (await again.pick(better, worse)).values == (1.0, 0.0)
    assert [line["kind"] for line in lines(tmp_path)] == ["rating", "rating", "pick"]
    assert [await wait for wait in waits] == [1.0, 0.0, 1.0, 0.0]


async def test_what_is_no_answer_here_is_refused(opened: Opened, tmp_path: Path) -> None:
    board = await opened()
    first = answer()
    other = answer(prompt="another prompt", group=4)
    waits = await asked(board, first, other)
    with golden.raises(UnknownAnswer):
        await board.rate("7.0.beef", 1.0)
    with pytest.raises(UnknownAnswer, match="different prompts"):
        await board.pick(first.id, other.id)
    with golden.raises(UnknownAnswer):
        await board.pick(first.id, first.id)
    assert lines(tmp_path) == []
    for wait in waits:
        wait.cancel()


async def test_a_late_rating_is_kept_and_counted(opened: Opened, tmp_path: Path) -> None:
    board = await opened()
    assert await board.value(answer(), FOREVER, 0.0) is None
    judgement = await board.rate(answer().id, 1.0)
    assert (judgement.late, board.file.late, lines(tmp_path)[0]["late"]) == (True, 1, True)


async def test_an_answer_that_is_too_old_to_train_waits_no_longer(opened: Opened, tmp_path: Path) -> None:
    board = await opened()
    old = asyncio.ensure_future(board.value(answer("old"), 4, SECONDS))
    (fresh,) = [asyncio.ensure_future(board.value(answer("fresh", 1), 5, SECONDS))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await board.version_seen(5)
    assert await old is None
    assert await board.value(answer("older", 2), 3, SECONDS) is None
    again = asyncio.ensure_future(board.value(answer("fresh", 1), 5, SECONDS))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [each.text for each in board.unanswered()] == ["fresh"]
    await board.rate(answer("fresh", 1).id, 1.0)
    assert await fresh == await again == 1.0


class SlowDisk:
    """A disk that writes a rating once `ended` is set."""

    def __init__(self, board: FeedbackBoard, patched: pytest.MonkeyPatch) -> None:
        self.began, self.ended = asyncio.Event(), asyncio.Event()
        self._add = board.file.add
        patched.setattr(board.file, "add", self)

    async def __call__(self, judgement: Judgement) -> None:
        self.began.set()
        await self.ended.wait()
        await self._add(judgement)


@pytest.mark.parametrize(("seconds", "seen"), [(0.05, 4), (SECONDS, 5)])
async def test_a_rating_that_is_being_written_counts_when_the_wait_ends(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, seconds: float, seen: int
) -> None:
    """It runs out, or a newer version is seen."""
    board = await opened()
    disk = SlowDisk(board, monkeypatch)
    wait = asyncio.ensure_future(board.value(answer(), 4, seconds))
    await asyncio.sleep(0)
    rating = asyncio.ensure_future(board.rate(answer().id, 0.75))
    await disk.began.wait()
    newer = asyncio.ensure_future(board.version_seen(seen))
    await asyncio.wait([wait, newer], timeout=0.1)
    disk.ended.set()
    assert (await wait, (await rating).late, board.file.late) == (0.75, False, 0)
    await newer


async def test_ratings_answer_their_samples_after_a_restart(opened: Opened, tmp_path: Path) -> None:
    board = await opened()
    (wait,) = await asked(board, answer())
    await board.rate(answer().id, 1.0)
    wait.cancel()  # The worker died before its caller heard of it.
    board.file.close()
    again = await opened()
    assert again.file.ratings == 1
    assert (await again.rate(answer().id, 1.0)).values == (
        1.0,
    )  # A client that did not hear of the first says it again.
    with pytest.raises(RatedBefore):
        await again.rate(answer().id, 0.0)
    assert await again.value(answer(), FOREVER, 0.0) == 1.0
    assert (again.file.ratings, again.file.late, len(lines(tmp_path))) == (1, 0, 1)


async def test_a_rating_of_a_sample_that_came_again_with_another_text_is_late(opened: Opened, tmp_path: Path) -> None:
    board = await opened()
    waits = await asked(board, answer("first try"))
    await board.rate(answer("first try").id, 1.0)
    assert await waits[0] == 1.0
    for _ in range(2):
        assert await board.value(answer("second try"), FOREVER, 0.0) is None
    assert board.file.late == 1
    assert lines(tmp_path)[1] == {"kind": "late", "sample": answer("first try").id}
    board.file.close()
    again = await opened()
    assert (again.file.ratings, again.file.late) == (1, 1)
    assert await again.value(answer("third try"), FOREVER, 0.0) is None
    assert again.file.late == 1


async def test_no_rating_is_counted_as_late_twice(opened: Opened) -> None:
    board = await opened()
    assert await board.value(answer("first try"), FOREVER, 0.0) is None
    assert (await board.rate(answer("first try").id, 1.0)).late
    assert await board.value(answer("second try"), FOREVER, 0.0) is None
    assert (board.file.ratings, board.file.late) == (1, 1)


async def test_a_pick_is_late_when_both_of_its_samples_came_again_with_other_texts(opened: Opened) -> None:
    board = await opened()
    waits = await asked(board, answer("a", 0), answer("b", 1))
    await board.pick(answer("a", 0).id, answer("b", 1).id)
    assert [await wait for wait in waits] == [1.0, 0.0]
    for text, member, late in (("c", 0, 0), ("d", 1, 1), ("e", 1, 1)):
        assert await board.value(answer(text, member), FOREVER, 0.0) is None
        assert board.file.late == late
    board.file.close()
    assert (await opened()).file.late == 1


async def test_a_torn_last_line_is_cut(opened: Opened, tmp_path: Path) -> None:
    board = await opened()
    waits = await asked(board, answer(), answer("b", 1))
    await board.rate(answer().id, 1.0)
    board.file.close()
    whole = (tmp_path / "ratings.jsonl").read_bytes()
    (tmp_path / "ratings.jsonl").write_bytes(whole + b'{"kind":"rating","answ')
    again = await opened()
    assert (again.file.ratings, again.file.value(answer().id)) == (1, 1.0)
    assert (tmp_path / "ratings.jsonl").read_bytes() == whole
    for wait in waits:
        wait.cancel()


async def test_a_cancelled_call_asks_nobody_any_more(opened: Opened, tmp_path: Path) -> None:
    board = await opened()
    (wait,) = await asked(board, answer())
    wait.cancel()
    await asyncio.wait([wait])
    assert (board.waiting, list(board.unanswered())) == (0, [])
    assert (await board.rate(answer().id, 1.0)).late


async def test_an_answer_that_waits_can_be_rated_however_many_came_and_went(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.rewards.feedback.waiting_answers.KNOWN_ANSWERS", 2)
    board = await opened()
    (waiting,) = await asked(board, answer("patient"))
    for member in range(1, 5):
        gone = asyncio.ensure_future(board.value(answer("gone", member), FOREVER, SECONDS))
        while board.waiting < 2:
            assert not gone.done(), "nobody was asked"
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
    await board.rate(answer("patient").id, 1.0)
    assert await waiting == 1.0
    assert (await board.rate(answer("gone", 4).id, 0.0)).late
    with pytest.raises(UnknownAnswer):
        await board.rate(answer("gone", 1).id, 0.0)


async def test_a_pick_is_in_time_while_one_of_its_answers_waits(opened: Opened) -> None:
    board = await opened()
    waiting, gone = await asked(board, answer("a"), answer("b", 1))
    gone.cancel()
    await asyncio.wait([gone])
    assert not (await board.pick(answer("a").id, answer("b", 1).id)).late
    assert (await waiting, board.file.late) == (1.0, 0)


async def test_an_answer_without_another_to_compare_it_with_waits_no_longer(opened: Opened) -> None:
    board = await opened()
    board.members = 4
    first, last, picked, other = (answer(text, number) for number, text in enumerate("abcd"))
    (waiting,) = await asked(board, last)
    assert await board.value(first, FOREVER, 0) is None
    assert board.waiting == 1, "two others may still come"
    both = [asyncio.ensure_future(board.value(each, FOREVER, SECONDS)) for each in (picked, other)]
    for _ in range(3):
        await asyncio.sleep(0)
    await board.pick(picked.id, other.id)
    assert await gather(*both) == (1.0, 0.0)
    assert await waiting is None
    assert (board.rated, board.unrated) == (2, 2)


async def test_an_answer_waits_for_others_of_its_attempt_and_of_its_group(opened: Opened) -> None:
    board = await opened()
    board.members = 2
    assert await board.value(answer("a", group=4), FOREVER, 0) is None
    assert await board.value(answer("a"), FOREVER, 0) is None
    assert await board.value(answer("b", 1), FOREVER, SECONDS) is None, "the last one has none to be compared with"
    waiting = asyncio.ensure_future(board.value(answer("b", 1), FOREVER, SECONDS, attempt=1))
    while not board.waiting:
        assert not waiting.done(), "the other one is sampled again in the new attempt"
        await asyncio.sleep(0)
    assert await board.value(answer("c"), FOREVER, 0, attempt=1) is None
    assert await waiting is None


async def test_an_answer_waits_until_the_last_call_for_it_ends(opened: Opened) -> None:
    board = await opened()
    calls = [asyncio.ensure_future(board.value(answer(), FOREVER, SECONDS)) for _ in range(3)]
    for _ in range(3):
        await asyncio.sleep(0)
    for call in calls[:2]:
        call.cancel()
        await asyncio.wait([call])
        assert [each.text for each in board.unanswered()] == ["hello"]
    assert not (await board.rate(answer().id, 0.75)).late
    assert (await calls[2], board.waiting, board.rated) == (0.75, 0, 1)


async def test_the_newest_ratings_are_remembered_and_the_oldest_is_forgotten(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.rewards.feedback.waiting_answers.REMEMBERED", 3)
    board = await opened()
    answers = [answer("a"), answer("b", 1), answer("b again", 1), answer("c", 2)]
    for each in answers:
        await board.file.add(Judgement((each,), (1.0,)))
    assert [board.file.value(each.id) for each in answers] == [None, 1.0, 1.0, 1.0]
    assert [board.file.is_reward(each.id) for each in answers] == [False, False, True, True]
    await board.file.add(Judgement((answer("d", 3),), (1.0,)))
    assert board.file.value(answers[1].id) is None
    assert board.file.is_reward(answers[2].id), "the other text of this member is the reward, and is remembered"
    late = board.file.late
    await board.file.note_other_text(answer("a once more"))
    assert (board.file.late, board.file.ratings) == (late, 5), "a forgotten rating is not counted as late"
