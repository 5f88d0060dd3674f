"""Chat completions as the policy's answers make them, streamed and whole."""

import json
from typing import Any

import pytest

from asyncrl.environments.agents.chat_completions import (
    ChatAnswer,
    ChatRequest,
    answer_of,
    chunks,
    completion,
    read_request,
)
from asyncrl.environments.tools.call_formats import FORMS
from asyncrl.environments.transcript import SampledAnswer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


def asked(**more: Any) -> ChatRequest:
    return read_request(json.dumps({"messages": [{"role": "user", "content": "a"}], **more}).encode())


def answered(request: ChatRequest, text: str, *tokens: str, finish: str = "stop") -> ChatAnswer:
    sampled = SampledAnswer(tokens, (-0.5,) * len(tokens), finish, 7) if tokens else None
    return answer_of(request, 3, text, sampled, FORMS["hermes"])


def streamed(request: ChatRequest, answer: ChatAnswer) -> list[dict[str, Any]]:
    *events, done = chunks(request, answer)
    assert done == "data: [DONE]\n\n"
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize(
    ("said", "tokens", "pieces"),
    [
        ("42", ("4", "2"), ["4", "2"]),
        ("42", ("4", "2", "<eos>"), ["4", "2", ""]),
        ("ö", ("\ufffd", "\ufffd"), ["ö"]),
        ("x" * 100, (), ["x" * 64, "x" * 36]),
    ],
)
def test_an_answer_is_streamed_token_by_token(said: str, tokens: tuple[str, ...], pieces: list[str]) -> None:
    request = asked(stream=True, stream_options={"include_usage": True}, logprobs=True)
    *found, usage = streamed(request, answered(request, said, *tokens))
    choices = [each["choices"][0] for each in found]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [each["delta"]["content"] for each in choices[1:] if "content" in each["delta"]] == pieces
    assert [known["token"] for each in choices if each["logprobs"] for known in each["logprobs"]["content"]] == list(
        tokens
    )
    assert choices[-1]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == (7 + len(tokens) if tokens else 0)


def test_bytes_of_log_probs_are_those_of_tokens_that_are_parts_of_characters() -> None:
    sampled = SampledAnswer(("a", "\ufffd", "\ufffd"), (-0.5,) * 3, "stop", 7, ("a", "\xc3", "\xa9"))
    request = asked(logprobs=True)
    answer = answer_of(request, 3, "aé", sampled, FORMS["hermes"])
    for content in (
        completion(request, answer)["choices"][0]["logprobs"]["content"],
        [
            known
            for each in streamed(request, answer)
            for known in (each["choices"][0]["logprobs"] or {}).get("content", [])
        ],
    ):
        assert [each["bytes"] for each in content] == [[97], [195], [169]]
        assert bytes(byte for each in content for byte in each["bytes"]).decode() == "aé"


def test_calls_are_streamed() -> None:
    request = asked(stream=True, tools=[TOOL], logprobs=True)
    *_, call, last = (each["choices"][0] for each in streamed(request, answered(request, CALL, "<tool", "_call>")))
    function = {"name": "add", "arguments": '{"a": 2}'}
    assert call["delta"]["tool_calls"] == [{"index": 0, "id": "call00300", "type": "function", "function": function}]
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")


@pytest.mark.parametrize(
    ("asks", "said", "content", "finish"),
    [
        ({"tools": [TOOL]}, CALL, None, "tool_calls"),
        ({"tools": [TOOL]}, f"I add.{CALL}", "I add.", "tool_calls"),
        ({"tools": [TOOL], "tool_choice": "none"}, CALL, CALL, "stop"),
        ({}, CALL, CALL, "stop"),
        ({"tools": [TOOL]}, f"{CALL}<tool_call>{{", f"{CALL}<tool_call>{{", "stop"),
        ({"stop": ["b", "cd"]}, "acdb", "a", "stop"),
        ({"stop": "x"}, "acdb", "acdb", "length"),
    ],
)
def test_what_the_policy_said_is_read(asks: dict[str, Any], said: str, content: str | None, finish: str) -> None:
    """A call that cannot be read stays text, with the calls beside it."""
    request = asked(**asks)
    answer = answered(request, said, "?", finish="length" if finish == "length" else "stop")
    choice = completion(request, answer)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, finish)
    assert ("tool_calls" in choice["message"]) == (finish == "tool_calls")


ADDS = {"type": "function", "function": {"name": "add"}}
MULTIPLIES = {"type": "function", "function": {"name": "multiply"}}


@pytest.mark.parametrize(
    ("choice", "said", "refusal"),
    [
        ("required", CALL, None),
        ("required", "5", "the answer calls no function, and tool_choice demands a call of one"),
        ("required", f"{CALL}<tool_call>{{", "the answer calls no function, and tool_choice demands a call of one"),
        (ADDS, CALL, None),
        (ADDS, "5", "the answer calls no function, and tool_choice demands a call of add"),
        (MULTIPLIES, CALL, "the answer calls add, and tool_choice demands a call of multiply"),
        ("auto", "5", None),
        ("none", "5", None),
    ],
)
def test_an_answer_without_the_demanded_call_is_what_the_policy_said_and_says_so(
    choice: Any, said: str, refusal: str | None
) -> None:
    tools = [TOOL, MULTIPLIES | {"function": {"name": "multiply", "parameters": {"type": "object"}}}]
    request, free = (asked(tools=tools, tool_choice=each) for each in (choice, "none" if choice == "none" else "auto"))
    answer = answered(request, said)
    assert answer.message == answered(free, said).message
    choices = [completion(each, answer)["choices"][0] for each in (request, free)]
    assert choices[0]["message"].pop("refusal") == refusal
    assert choices[1]["message"].pop("refusal") is None
    assert choices[0] == choices[1]
    told = [each["choices"][0]["delta"]["refusal"] for each in streamed(request, answer) if "refusal" in str(each)]
    assert told == ([refusal] if refusal else [])


def test_an_answer_comes_back_as_it_is_known() -> None:
    """The agent sends back the same message as the policy said, by its digest."""
    request = asked(tools=[TOOL])
    answer = answered(request, f"I add.{CALL}")
    sent_back = completion(request, answer)["choices"][0]["message"]
    history = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, sent_back]
    later = read_request(json.dumps({"messages": history, "tools": [TOOL]}).encode())
    assert later.messages == (*request.messages, answer.message)
