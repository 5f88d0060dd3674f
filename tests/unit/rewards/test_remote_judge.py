"""The template `judge` against a real HTTP server that is busy, slow, broken and hostile."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config, ModelConfig, RewardConfig, TaskConfig
from asyncrl.errors import RewardError
from asyncrl.rewards import Sample
from asyncrl.rewards.execution.child_pool import ChildPool
from asyncrl.rewards.execution.scoring import score_of
from asyncrl.rewards.functions import function_problems, function_specs
from asyncrl.rewards.remote_judge import LARGEST_REPLY, CallLimits, RemoteJudge, Timing, jittered
from tests import golden
from tests.unit.rewards.chat_server import CLOSES, HANGS, ChatServer, answer, chat_server, says

SAMPLE = Sample("Say hi.", "hi", {"prompt": "Say hi.", "wanted": "a greeting"}, 3, 1, "stop", 1)
KEY = "sk-of-a-test"


@dataclass
class Time:
    """A clock that only sleeps move, and jitter that is none."""

    now: float = 100.0
    slept: list[float] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 3))
        self.now += seconds
        await asyncio.sleep(0)

    @property
    def timing(self) -> Timing:
        return Timing(lambda: self.now, self.sleep, lambda seconds: seconds)


@pytest.fixture
def time() -> Time:
    return Time()


@asynccontextmanager
async def judged(
    time: Time, *answers: bytes, held: bool = False, **options: Any
) -> AsyncIterator[tuple[ChatServer, RemoteJudge]]:
    async with chat_server(answers, held=held) as server:
        judge = RemoteJudge(**{"url": server.url, "model": "m", "deadline": 60.0} | options)
        judge.timing = time.timing
        try:
            yield server, judge
        finally:
            if judge._loop is not None and judge._endpoint._client is not None:
                await judge._endpoint._client.aclose()


async def test_what_is_asked_and_what_comes_back(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_THE_JUDGE", KEY)
    rubric = "{prompt}|{answer}|{wanted}|{conversation}|{not a place}"
    options = {"rubric": rubric, "key_variable": "KEY_OF_THE_JUDGE", "body": {"max_tokens": 5, "model": "other"}}
    said = replace(SAMPLE, text="{wanted}", turns=[{"role": "assistant", "content": "hm"}])
    async with judged(time, says("I think. Score: 3\nno, score = **7.5**"), **options) as (server, judge):
        assert await judge(said) == 0.75
    assert server.asked == [
        {
            "model": "m",
            "max_tokens": 5,
            "messages": [
                {"role": "user", "content": "Say hi.|{wanted}|a greeting|Say hi.\nassistant: hm|{not a place}"}
            ],
        }
    ]
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert server.headers[0]["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("options", "reply", "score"),
    [
        ({}, "Score: 10", 1.0),
        ({}, "I give a score (0-10) here.\nScore: 7\n- 2 reasons", 0.7),
        ({"lowest": -1.0, "highest": 1.0}, "score -0.5", 0.25),
        ({"pattern": r"<(\d+)>"}, "<1> or <4>", 0.4),
        ({"json_field": "grade", "highest": 5.0}, '```json\n{"why": "{}", "grade": 2.5}\n```', 0.5),
        ({"json_field": "grade"}, '{"grade": "6"}', 0.6),
        ({"json_field": "grade"}, 'The value \\frac{1}{2} is right.\n{"grade": 7}', 0.7),
        ({"json_field": "grade"}, '{"grade": 7} I hope {this} helps', 0.7),
        ({"json_field": "grade"}, '<think>{"grade": 1}?</think>{"grade": 7}', 0.7),
        ({"json_field": "grade"}, '{"grade": 1}, no: {"why": "a {b}", "grade": 7.0}', 0.7),
        ({"json_field": "grade"}, '{"why": "\\sqrt{2} and\n\\underline{x}", "grade": 7}', 0.7),
        ({"json_field": "grade"}, '\\boxed{{"grade": 7}} of the set {1, 2}', 0.7),
        ({"json_field": "grade"}, '{"grade": 7} and {"other": 3}', 0.7),
        ({}, "Score: 7. The minimum score 0 means useless.", 0.7),
        ({}, "**Score:** 7/10", 0.7),
        ({}, "The score is 7.", 0.7),
        ({}, "<think>Score: 3? No.</think>Score: 7 out of 10", 0.7),
    ],
)
async def test_where_the_score_stands(time: Time, options: dict[str, Any], reply: str, score: float) -> None:
    async with judged(time, says(reply), **options) as (_, judge):
        assert await judge(SAMPLE) == score


GRADE = {"json_field": "grade"}


@pytest.mark.parametrize(
    ("options", "reply"),
    [
        ({}, "Well done!"),
        ({"pattern": r"<(\d+)>"}, "Score: 7"),
        *(({}, reply) for reply in ("Score: 87", "Score (0 to 10): 7", "<think>Score: 3", "Score: 4/5", "Score: 7,5")),
        *((GRADE, reply) for reply in ('{"grade": 9} {"grade": 2, "grade": 7}', '{"grade": 7, "grade": 7}')),
        *((GRADE, reply) for reply in ('{"grade": ' + "9" * 400 + "}", "[" * 100_000, '{"grade": [1]}')),
        *((GRADE, f'{{"grade": {value}}}') for value in ("NaN", "true", "null", '"1_0"')),
        *((GRADE, reply) for reply in ('<think>{"grade": 3}', "{grade} of {7}")),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_reply_without_a_score_is_asked_for_again(time: Time, options: dict[str, Any], reply: str) -> None:
    async with judged(time, says(reply), tries=2, body={"temperature": 0.5}, **options) as (server, judge):
        with golden.raises(RewardError, match="2 tries"):
            await judge(SAMPLE)
        assert len(server.asked) == 2


async def test_a_reply_that_would_be_the_same_is_not_asked_for_again(time: Time) -> None:
    async with judged(time, says("Well done!"), says("Score: 7"), tries=2) as (server, judge):
        with golden.raises(RewardError, match="0"):
            await judge(SAMPLE)
        assert len(server.asked) == 1
    async with judged(time, says("Well done!"), says("Score: 7"), tries=2, body={}) as (server, judge):
        assert await judge(SAMPLE) == 0.7


BUSY = answer(503, b"come back later")


async def test_what_may_pass_is_tried_again_ever_later(time: Time) -> None:
    garbage = answer(200, b"<html>")
    async with judged(time, BUSY, CLOSES, garbage, answer(429, b""), says("score 1")) as (server, judge):
        assert await judge(SAMPLE) == 0.1
    assert time.slept == [0.5, 1, 2, 4]
    assert len(server.asked) == 5


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 599])
async def test_a_status_that_may_pass_is_tried_again(status: int, time: Time) -> None:
    async with judged(time, answer(status, b"wait"), says("score 1")) as (server, judge):
        assert await judge(SAMPLE) == 0.1
    assert (len(server.asked), time.slept) == (2, [0.5])


async def test_pauses_are_bounded_and_none_follows_the_last_try(time: Time) -> None:
    async with judged(time, BUSY, tries=9, deadline=1000.0) as (server, judge):
        with golden.raises(RewardError, match="9 tries"):
            await judge(SAMPLE)
    assert time.slept == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert len(server.asked) == 9


def test_calls_that_failed_together_do_not_come_back_together() -> None:
    pauses = {jittered(8.0) for _ in range(100)}
    assert len(pauses) > 90
    assert 4 <= min(pauses) < 5 < 7 < max(pauses) <= 8


async def test_a_busy_server_says_when_to_come_back(time: Time) -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    answers = answer(429, b"", "retry-after: 20"), answer(503, b"", f"Retry-After: {later}"), says("score 1")
    async with judged(time, *answers) as (_, judge):
        assert await judge(SAMPLE) == 0.1
    assert time.slept[0] == 20.5
    assert 25 < time.slept[1] < 35


async def test_a_pause_that_is_too_long_is_not_waited_for(time: Time) -> None:
    async with judged(time, answer(429, b"quota", "retry-after: 3600")) as (_, judge):
        with golden.raises(RewardError, match="3600 s.*HTTP 429: 'quota'"):
            await judge(SAMPLE)
    assert time.slept == []


@pytest.mark.parametrize("status", [301, 400, 401, 404, 409, 426, 499])
async def test_a_refusal_is_not_asked_for_again_and_keeps_the_key_secret(
    time: Time, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_THE_JUDGE", KEY)
    refusal = answer(status, f"what is {KEY}?".encode(), "location: http://127.0.0.1:1/")
    async with judged(time, refusal, key_variable="KEY_OF_THE_JUDGE") as (server, judge):
        with golden.raises(RewardError, match=rf"v1/chat/completions.*HTTP {status}: 'what is \*\*\*\?'"):
            await judge(SAMPLE)
        assert (len(server.asked), time.slept) == (1, [])


async def test_megabytes_are_not_read(time: Time) -> None:
    chunk = b"%x\r\n%s\r\n" % (LARGEST_REPLY + 1, bytes(LARGEST_REPLY + 1))
    async with judged(time, b"HTTP/1.1 200 said\r\ntransfer-encoding: chunked\r\n\r\n" + chunk) as (_, judge):
        with golden.raises(RewardError, match=f"{LARGEST_REPLY}"):
            await judge(SAMPLE)


async def test_a_compressed_reply_is_refused(time: Time) -> None:
    async with judged(time, answer(200, b"bomb", "content-encoding: gzip")) as (_, judge):
        with pytest.raises(RewardError, match="is compressed"):
            await judge(SAMPLE)


async def test_a_judge_that_hangs(time: Time) -> None:
    async with judged(time, HANGS, says("score 2"), seconds=0.05) as (_, judge):
        assert await judge(SAMPLE) == 0.2
    async with judged(time, HANGS, deadline=0.05) as (_, judge):
        with golden.raises(RewardError, match=r"0\.05 s"):
            await judge(SAMPLE)
    async with judged(time, HANGS, seconds=0.01, tries=2) as (_, judge):
        with golden.raises(RewardError, match=r"2 tries.*0\.01 s"):
            await judge(SAMPLE)


async def test_a_judge_that_is_down(time: Time) -> None:
    async with judged(time, BUSY) as (server, _):
        pass
    judge = RemoteJudge(server.url, "m", tries=3)
    judge.timing = time.timing
    with pytest.raises(RewardError, match="3 tries"):
        await judge(SAMPLE)


async def test_the_rate_and_the_calls_in_flight_are_limited(time: Time) -> None:
    samples = [replace(SAMPLE, text=str(number)) for number in range(8)]
    async with judged(time, says("score 1"), held=True, in_flight=3, per_second=2.0) as (server, judge):
        scored = asyncio.gather(*map(judge, samples))
        for _ in range(3):
            await server.begun.acquire()
        server.held.set()
        assert await scored == [0.1] * 8
    assert server.most == 3
    assert time.now >= 100.0 + 7 * 0.5
    assert set(time.slept) == {0.5}


async def test_calls_begin_evenly_spaced_and_after_the_longest_pause(time: Time) -> None:
    async def begun(limits: CallLimits) -> float:
        async with limits.call():
            return time.now

    spaced = CallLimits(8, 4.0, lambda: time.now, time.sleep)
    assert [await begun(spaced) for _ in range(4)] == [100.0, 100.25, 100.5, 100.75]
    time.now = 200.0
    assert [await begun(spaced), await begun(spaced)] == [200.0, 200.25]
    paused = CallLimits(8, 0.0, lambda: time.now, time.sleep)
    paused.pause(20.0)
    paused.pause(5.0)
    assert [await begun(paused), await begun(paused)] == [220.25, 220.25]


async def test_the_same_question_is_asked_once(time: Time) -> None:
    async with judged(time, says("score 1"), cache=2) as (server, judge):
        assert list(await asyncio.gather(judge(SAMPLE), judge(SAMPLE))) == [0.1, 0.1]
        assert len(server.asked) == 1
        for text in "abhi":
            await judge(replace(SAMPLE, text=text))
        await judge(replace(SAMPLE, text="h"))
        assert len(server.asked) == 5
        for text in "jh":  # `h` was used last, so that `i` gives way to `j`.
            await judge(replace(SAMPLE, text=text))
        assert len(server.asked) == 6
    async with judged(time, says("score 1"), cache=0) as (server, judge):
        assert list(await asyncio.gather(judge(SAMPLE), judge(SAMPLE))) == [0.1, 0.1]
        assert len(server.asked) == 2


async def test_long_answers_that_begin_alike_are_two_questions(time: Time) -> None:
    async with judged(time, says("score 1"), cache=2) as (server, judge):
        for end in ("good", "bad", "good"):
            await judge(replace(SAMPLE, text="word " * 1000 + end))
        assert len(server.asked) == 2


async def test_who_waits_for_another_call_asks_itself_when_that_is_cancelled(time: Time) -> None:
    async with judged(time, says("score 1"), held=True) as (server, judge):
        first = asyncio.ensure_future(judge(SAMPLE))
        second = asyncio.ensure_future(judge(SAMPLE))
        await server.begun.acquire()
        first.cancel()
        server.held.set()
        assert await second == 0.1
        assert len(server.asked) == 2


async def test_the_error_of_a_call_is_that_of_all_who_wait_for_it(time: Time) -> None:
    async with judged(time, answer(400, b"no"), held=True) as (server, judge):
        both = asyncio.gather(judge(SAMPLE), judge(SAMPLE), return_exceptions=True)
        server.held.set()
        assert [type(each) for each in await both] == [RewardError] * 2
        assert len(server.asked) == 1


async def test_a_column_that_the_row_lacks_is_named(time: Time) -> None:
    async with judged(time, says("score 1"), rubric="{wantd}") as (_, judge):
        with golden.raises(RewardError, match=r"\{wantd\}.*column wantd"):
            await judge(SAMPLE)


URL = "http://127.0.0.1:1/v1"


@pytest.mark.parametrize(
    "options",
    [
        {"url": None},
        {"url": "localhost:8000"},
        {"url": "http://me:secret@host/v1"},
        {"key_variable": "NO_SUCH_KEY"},
        {"key_variable": "ASYNCRL_KEY"},
        {"patern": "x"},
        {"pattern": "("},
        {"pattern": "x", "json_field": "y"},
        {"lowest": 10},
        {"tries": 0},
        {"cache": -1},
        {"per_second": 0.1},
        {"deadline": 11.0},
    ],
)
def test_mistakes_are_found_before_the_run(options: dict[str, Any]) -> None:
    given = {name: value for name, value in {"url": URL, "model": "m", **options}.items() if value is not None}
    (problem,) = function_problems(_config(given))
    assert problem.key == "reward.functions"
    golden.says(problem.text)


def test_the_deadline_is_that_of_the_rewards() -> None:
    (spec,) = function_specs(_config({"url": URL, "model": "m"}, deadline=40.0))
    assert spec.options["deadline"] == 36.0


def test_samples_that_wait_for_long_wait_where_no_deadline_runs() -> None:
    assert RemoteJudge(URL, "m").overlapping == 32
    assert RemoteJudge(URL, "m", in_flight=100).overlapping == 100
    assert RemoteJudge(URL, "m", per_second=2.0).overlapping == 9
    assert RemoteJudge(URL, "m", per_second=0.2).overlapping == 1


async def test_a_judge_in_a_child_that_is_down_is_named_with_its_sample(tmp_path: Path) -> None:
    async with (
        chat_server([answer(418, json.dumps({"error": "teapot"}).encode())]) as server,
        asyncio.TaskGroup() as tasks,
    ):
        specs = function_specs(_config({"url": server.url, "model": "m"}))
        pool = ChildPool(specs, tasks, workers=1, deadline=10, start_deadline=60, printed=tmp_path / "printed")
        try:
            await pool.start()
            results = await pool.run(0, [SAMPLE])
        finally:
            await pool.stop()
    with pytest.raises(RewardError) as raised:
        score_of(SAMPLE, specs, results, "fail")
    first, second, *_ = str(raised.value).splitlines()
    golden.says(first, "1", "group 3")
    assert first.endswith("""cannot be used: HTTP 418: '{"error": "teapot"}'""")
    assert second == "  completion: 'hi'"


def _config(options: dict[str, Any], **reward: Any) -> Config:
    functions = ({"use": "judge", "options": options},)
    return Config(
        model=ModelConfig(name="m"), task=TaskConfig(prompts="p"), reward=RewardConfig(functions=functions, **reward)
    )
