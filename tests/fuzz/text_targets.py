"""Targets whose bytes are text: what agents, people, models, judges, programs and servers of environments say."""

import asyncio
import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import msgpack
import numpy as np
from starlette.exceptions import HTTPException

from asyncrl.children.sandbox.single_sandbox import Report, SandboxEnded
from asyncrl.engines.acting.stepping.answers import read_answers
from asyncrl.environments.adapters.openenv_client import _object_in, _observed, _UnreadableAction
from asyncrl.environments.agents.chat_completions import RefusedRequest, read_request
from asyncrl.environments.tools.call_formats import FORMS
from asyncrl.errors import EnvironmentFailed, WireError
from asyncrl.protocols.prompt_row import PackedRow, PromptRow
from asyncrl.rewards.feedback.waiting_answers import UnknownAnswer
from asyncrl.rewards.feedback.web import FeedbackWeb, _body
from asyncrl.rewards.remote_judge import FailedTry, ScoreReader, _content, _seconds_asked


def _json(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


class ChatBodies:
    """A request of an agent to the endpoint of its episode."""

    seeds: ClassVar = _json(
        {"model": "policy", "messages": [{"role": "user", "content": "2+2"}], "stream": True, "stop": ["x"]},
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "2"},
            ],
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
        },
    )

    def __call__(self, data: bytes) -> None:
        try:
            read_request(data)
        except RefusedRequest:
            return

    def close(self) -> None:
        """There is nothing to close."""


class ToolCalls(ChatBodies):
    """An answer of the policy, in which calls of tools are read; reading never raises."""

    seeds: ClassVar = [
        b'<think>so</think>text <tool_call>{"name": "add", "arguments": {"a": [1, 2.5, null]}}</tool_call>',
        b'<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "b", "parameters": {}}',
        b"[add(a=1, b=[True, None, -2.5], c={'k': 'v'}), other()]",
    ]

    def __call__(self, data: bytes) -> None:
        for form in FORMS.values():
            form.parse(data.decode(errors="replace"))


class JudgeReplies(ChatBodies):
    """The reply of a judge on another host: its header, its body and the score in it."""

    seeds: ClassVar = _json(
        {"choices": [{"message": {"content": "Score: 7"}}]},
        {"choices": [{"message": {"content": 'well: {"score": 7, "why": "x"}'}}]},
    )
    readers: ClassVar = [ScoreReader("", "", 0, 10), ScoreReader("", "score", 0, 10), ScoreReader("=(.*)", "", 0, 1)]

    def __call__(self, data: bytes) -> None:
        assert _seconds_asked(data.decode("latin-1")) >= 0.0
        try:
            reply = _content(data)
        except FailedTry:
            reply = data.decode(errors="replace")
        for reader in self.readers:
            try:
                assert 0.0 <= reader.score(reply) <= 1.0
            except ValueError:
                continue


class Ratings:
    """A rating that somebody posts to the page of live feedback."""

    seeds: ClassVar = _json(
        {"sample": "1.0", "rating": 3}, {"chosen": "1.0", "other": "1.1"}, {"equal": ["1.0", "1.1"]}
    )

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        config: Any = SimpleNamespace(scale=5)
        self._web = FeedbackWeb(_NoBoard(), config, "key")  # type: ignore[arg-type]

    def __call__(self, data: bytes) -> None:
        self._loop.run_until_complete(self._take(data))

    async def _take(self, data: bytes) -> None:
        async def stream() -> Any:
            for start in range(0, len(data), 1000):
                yield data[start : start + 1000]

        request: Any = SimpleNamespace(stream=stream)
        try:
            await self._web._decide(await _body(request))
        except (HTTPException, UnknownAnswer):
            return

    def close(self) -> None:
        self._loop.close()


class _NoBoard:
    """Knows no answer."""

    async def rate(self, name: str, value: float) -> None:
        assert 0.0 <= value <= 1.0, value
        raise UnknownAnswer(name)

    async def pick(self, chosen: str, other: str, *, equal: bool = False) -> None:
        raise UnknownAnswer(chosen + other)


class SandboxReports(ChatBodies):
    """Reports of the first process of a sandbox, which a program runs beside."""

    seeds: ClassVar = [b"0 0.5 0.4 1024 0 ended\nnote", b"-9 1 1 1 1 time"]

    def __call__(self, data: bytes) -> None:
        try:
            Report.parsed(data)
        except SandboxEnded:
            return


class EnvironmentAnswers(ChatBodies):
    """Answers of an OpenEnv server, and the action that a policy writes for it."""

    seeds: ClassVar = _json(
        {"type": "observation", "data": {"observation": {"text": "x"}, "reward": 1.0, "done": False}},
        {"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": [{"loc": ["a", 1], "msg": "no"}]}},
    )

    def __call__(self, data: bytes) -> None:
        text = data.decode(errors="replace")
        with suppress(_UnreadableAction):
            _object_in(text)
        try:
            _observed(json.loads(text), "step")
        except (EnvironmentFailed, _UnreadableAction, ValueError, RecursionError):
            return


class SteppedAnswers(ChatBodies):
    """Reads what a child says of the environments that it stepped."""

    seeds: ClassVar = [
        msgpack.packb(
            {"places": [0, 1], "observations": bytes(16), "rewards": bytes(8), "ends": b"\0\2", "following": bytes(8)}
        ),
        msgpack.packb(
            {"places": [1], "observations": bytes(8), "rewards": bytes(4), "ends": b"\0", "errors": {1: "no"}}
        ),
    ]

    def __call__(self, data: bytes) -> None:
        try:
            message = msgpack.unpackb(data, raw=False, strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
            return
        try:
            answers = read_answers(message, range(4, 6), 2)
        except WireError:
            return
        assert {*answers.places.tolist()} <= {4, 5}
        assert answers.observations.shape == answers.following.shape == (len(answers.places), 2)


class PromptRows(ChatBodies):
    """The row of a prompt, which another worker packed."""

    seeds: ClassVar = [msgpack.packb({"prompt": "2+2", "number": 4, "more": [1, {"a": None}]})]

    def __call__(self, data: bytes) -> None:
        try:
            PromptRow.of(PackedRow(b"", np.frombuffer(data, np.uint8)))
        except ValueError:
            return


TEXTS = {
    "chat": ChatBodies,
    "tools": ToolCalls,
    "judge": JudgeReplies,
    "feedback": Ratings,
    "sandbox": SandboxReports,
    "environment": EnvironmentAnswers,
    "acting": SteppedAnswers,
    "rows": PromptRows,
}
