"""Requests for chat completions: what is read, what has no effect, and what is refused by its name."""

import json
from typing import Any

import pytest

from asyncrl.environments.agents.chat_completions import SET_BY_EXPERIMENT, RefusedRequest, read_request
from tests import golden

USER = {"role": "user", "content": "a"}

ADD = {"type": "function", "function": {"name": "add"}}
NAMED = {"type": "function", "function": {"name": "add"}}


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER], **fields}).encode()


def test_messages_are_read_as_chat_templates_take_them() -> None:
    call = {"id": "x1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    given = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "5", "tool_call_id": "x1"},
    ]
    found = read_request(body(messages=given)).messages
    read = {"id": "x1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    assert list(found) == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "ab", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [read]},
        {"role": "tool", "content": "5", "tool_call_id": "x1", "name": "add"},
    ]


def test_what_the_experiment_sets_has_no_effect() -> None:
    plain = read_request(body())
    assert read_request(body(**dict.fromkeys(SET_BY_EXPERIMENT, 1), n=1, response_format={"type": "text"})) == plain


@pytest.mark.parametrize(
    ("choice", "calls", "demanded"),
    [
        (None, True, None),
        ("auto", True, None),
        ("none", False, None),
        ("required", True, ""),
        (NAMED, True, "add"),
        ({"function": {"name": "add"}}, True, "add"),
    ],
)
def test_each_choice_of_tools_is_taken(choice: Any, calls: bool, demanded: str | None) -> None:
    found = read_request(body(tools=[ADD], tool_choice=choice))
    assert (found.calls, found.demanded) == (calls, demanded)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"temprature": 1}, "temprature"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "ad"}}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": "add"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": 1}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": []}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": []}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"messages": [USER] * 10_001}, "messages"),
        ({"messages": [USER, {"role": "critic"}]}, "messages[1]"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0]"),
        ({"tools": [{"name": "add"}]}, "tools"),
        ({"tools": "add"}, "tools"),
        ({"stop": [1]}, "stop"),
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RefusedRequest) as refused:
        read_request(body(**fields))
    assert (refused.value.status, refused.value.param) == (400, param)
    golden.says(str(refused.value))


@pytest.mark.parametrize(
    "given", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"a": NaN}', b'{"a": "\\ud800"}', b"1" * 5000]
)
def test_what_is_no_json_is_refused(given: bytes) -> None:
    with pytest.raises(RefusedRequest, match="no JSON"):
        read_request(given)


def test_digests_tell_conversations_apart() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    longer = read_request(body(messages=[USER, {"role": "user", "content": "b"}]))
    assert read_request(body()).digest == longer.digests[0] != longer.digest
    assert read_request(body(tools=[tool])).digest != longer.digests[0]
    assert read_request(body(messages=[{"role": "system", "content": "a"}])).digest != longer.digests[0]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ('{"a": 1, "b": 2.5}', {"a": 1, "b": 2.5}),
        ({"a": 1}, {"a": 1}),
        ("{'a': 1, 'b': None}", {"a": 1, "b": None}),
        (json.dumps(json.dumps({"a": 1})), {"a": 1}),
        ("", {}),
        (None, {}),
        ("[1]", "[1]"),
        ("a = 1", "a = 1"),
        ('{"a": ', '{"a": '),
    ],
)
def test_arguments_are_objects_in_every_writing_as_those_of_rows_are(given: Any, read: Any) -> None:
    call = {"id": "x1", "type": "function", "function": {"name": "add", "arguments": given}}
    asked = read_request(body(messages=[USER, {"role": "assistant", "tool_calls": [call]}]))
    assert asked.messages[1]["tool_calls"][0]["function"]["arguments"] == read
