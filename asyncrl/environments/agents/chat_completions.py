"""Writes chat completions: whole, or as a stream of chunks."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from asyncrl.environments.agents.chat_requests import ChatRequest
from asyncrl.environments.observation import Message
from asyncrl.environments.sampled_answers import SampledAnswer
from asyncrl.environments.tools.call_formats import Form
from asyncrl.environments.tools.parsed_calls import ToolCall

DONE = "data: [DONE]\n\n"
PIECE = 64
"""Characters of a chunk where the tokens are not known."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """Holds an answer of the policy. turn: its number in the episode, from 1. content: without the calls, and cut
    before a stop string of the agent. cut: something was."""

    turn: int
    content: str
    calls: tuple[ToolCall, ...]
    sampled: SampledAnswer | None
    cut: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def message(self) -> Message:
        """Returns the message as `read_request` reads it when an agent sends it back."""
        calls = [
            {"id": self.call_id(number), "type": "function", "function": {"name": each.name, "arguments": arguments}}
            for number, each in enumerate(self.calls)
            for arguments in [dict(each.arguments)]
        ]
        return {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})

    def call_id(self, number: int) -> str:
        """Returns the id of a call: nine letters and digits, as strict templates want, the same when an episode is
        played again."""
        return f"call{self.turn % 1000:03d}{number % 100:02d}"

    @property
    def finish(self) -> str:
        if self.calls:
            return "tool_calls"
        return "length" if self.sampled is not None and self.sampled.finish == "length" and not self.cut else "stop"


def answer_of(
    request: ChatRequest, turn: int, text: str, sampled: SampledAnswer | None, form: Form, opened: bool = False
) -> ChatAnswer:
    """Reads the text that the policy said as the answer to a request. A call that cannot be read stays text. opened:
    whether the text begins inside thoughts."""
    found = form.parse(text, opened) if request.calls else None
    if found is not None and found.calls and not found.mistakes:
        return ChatAnswer(turn, found.content, found.calls, sampled)
    ends = [place for stop in request.stop if (place := text.find(stop)) >= 0]
    return ChatAnswer(turn, text[: min(ends)] if ends else text, (), sampled, cut=bool(ends))


def refusal(request: ChatRequest, answer: ChatAnswer) -> str | None:
    """Returns in what an answer does not do what `tool_choice` demands, which nothing makes a policy do; None where it
    does. The policy trains on what it sampled, whatever was demanded."""
    wanted, called = request.demanded, ", ".join(call.name for call in answer.calls)
    if wanted is None or (called if wanted == "" else wanted in [call.name for call in answer.calls]):
        return None
    return f"the answer calls {called or 'no function'}, and tool_choice demands a call of {wanted or 'one'}"


def completion(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    """Returns the body of a response that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": refusal(request, answer)}
    if answer.calls:
        message |= {"content": answer.content or None, "tool_calls": _calls(answer)}
    logprobs = _logprobs(answer) if request.logprobs else None
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": answer.finish}
    return {**_head(request, answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def chunks(request: ChatRequest, answer: ChatAnswer) -> Iterator[str]:
    """Yields the events of a stream."""
    head = _head(request, answer, "chat.completion.chunk")

    def event(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return _event({**head, "choices": [choice]})

    yield event({"role": "assistant", "content": ""})
    pieces = _pieces(answer)
    known = _logprobs(answer) if request.logprobs else None
    if known is not None and len(pieces) != len(known["content"]):
        yield event({}, logprobs=known)  # Tokens that are no text of their own, or that calls are made of.
        known = None
    for number, piece in enumerate(pieces):
        yield event({"content": piece}, logprobs=known and {"content": [known["content"][number]], "refusal": None})
    for number, call in enumerate(_calls(answer)):
        yield event({"tool_calls": [{"index": number, **call}]})
    if said := refusal(request, answer):
        yield event({"refusal": said})
    yield event({}, answer.finish)
    if request.usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield DONE


def _pieces(answer: ChatAnswer) -> list[str]:
    """Returns the content in parts: a part for each token where it is made of them; the last may be its end."""
    tokens = [] if answer.sampled is None else list(answer.sampled.tokens)
    if tokens and not answer.calls:
        for parts in (tokens, [*tokens[:-1], ""]):
            if "".join(parts) == answer.content:
                return parts
    return [answer.content[place : place + PIECE] for place in range(0, len(answer.content), PIECE)]


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _head(request: ChatRequest, answer: ChatAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.turn}", "object": kind, "created": answer.created, "model": request.model}


def _calls(answer: ChatAnswer) -> list[dict[str, Any]]:
    return [
        {
            "id": answer.call_id(number),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for number, call in enumerate(answer.calls)
    ]


def _logprobs(answer: ChatAnswer) -> dict[str, Any] | None:
    if (sampled := answer.sampled) is None:
        return None
    content = [
        {"token": token, "logprob": logprob, "bytes": list(own), "top_logprobs": []}
        for token, logprob, own in zip(sampled.tokens, sampled.logprobs, sampled.token_bytes, strict=True)
    ]
    return {"content": content, "refusal": None}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    if answer.sampled is None:
        return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    prompt, own = answer.sampled.context, len(answer.sampled.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": own, "total_tokens": prompt + own}
