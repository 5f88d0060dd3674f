"""Messages and tools of rows, and texts that become messages."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks import Prompts, load_prompts, training_prompts
from asyncrl.tasks.chat_messages import in_one_form
from tests import golden

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKS = {"role": "user", "content": "1 + 1?"}


def prompt(content: Any, **more: Any) -> Any:
    return Prompts([{"prompt": [{"role": "user", "content": content, **more}]}], "p").row(0).prompt


def test_parts_that_are_texts_become_one_text() -> None:
    parts = [{"type": "text", "text": "What is "}, "1 + ", {"text": "1?"}]
    assert prompt(parts) == [{"role": "user", "content": "What is 1 + 1?"}]


def test_content_that_is_no_text_is_refused() -> None:
    picture = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}]
    for content in (picture, [{"type": "text", "text": 3}], [3], 3, {"text": "a"}):
        with golden.raises(TaskError, match=r"^p, row 1: message 1 \(user\)"):
            prompt(content)


def test_an_answer_that_calls_tools_needs_no_text() -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    messages = [ASKS, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert Prompts([{"prompt": messages}], "p").row(0).prompt == messages
    with golden.raises(TaskError, match="message 2"):
        Prompts([{"prompt": [ASKS, {"role": "assistant", "content": None}]}], "p")


@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD])])
def test_tools_of_a_row_are_a_list_or_a_text_of_one(tools: Any) -> None:
    assert Prompts([{"prompt": [ASKS], "tools": tools}], "p").row(0).columns["tools"] == [ADD]


def test_other_columns_of_that_name_are_refused_or_left_out() -> None:
    for tools in ("hammer", {"name": "add"}, ["add"], "[3]"):
        rows = [{"prompt": [ASKS], "tools": tools}]
        with golden.raises(TaskError, match="row 1.*column tools"):
            Prompts(rows, "p")
        assert "tools" not in load_prompts(rows, columns={"tools": ""}).row(0).columns


def test_tools_need_a_chat() -> None:
    rows = [{"prompt": "1 + 1?", "tools": [ADD]}]
    with golden.raises(TaskError, match=r'task\.text_prompts = "chat"'):
        load_prompts(rows)
    assert load_prompts(rows, chat=True).row(0).prompt == [ASKS]


def test_texts_become_messages_where_the_config_says_so() -> None:
    config = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p", "text_prompts": "chat"}})
    assert training_prompts(config, [{"prompt": "1 + 1?"}]).row(0).prompt == [ASKS]
    assert training_prompts(config, [{"prompt": [ASKS]}]).row(0).prompt == [ASKS]


def test_arguments_that_asyncrl_gives_the_template_are_refused() -> None:
    with golden.raises(ConfigError):
        load(None, ["--model.name", "m", "--task.prompts", "p", "--task.chat_template_kwargs", "{ tools = [] }"], {})


CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": "Rome"}}}


def called(**function: Any) -> Any:
    call = {"type": "function", "function": {"name": "get", **function}}
    return Prompts([{"prompt": [ASKS, {"role": "assistant", "content": "", "tool_calls": [call]}]}], "p").row(0)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "Rome"}',
        json.dumps('{"city": "Rome"}'),
        "{'city': 'Rome'}",
        {"city": "Rome"},
        {"city": "Rome", "at": None},
    ],
)
def test_arguments_of_calls_are_objects_in_every_writing(arguments: Any) -> None:
    found = called(arguments=arguments)
    assert found.prompt[1]["tool_calls"] == [CALL]
    assert found.columns["prompt"][1]["tool_calls"] == [CALL]


@pytest.mark.parametrize(("given", "read"), [(..., {}), ("", {}), (None, {}), ("{}", {}), ('{"x": null}', {"x": None})])
def test_a_call_without_arguments_has_an_empty_object_and_null_in_their_text_is_meant(given: Any, read: Any) -> None:
    found = called() if given is ... else called(arguments=given)
    assert found.prompt[1]["tool_calls"][0]["function"]["arguments"] == read


def test_arguments_that_are_no_object_are_refused() -> None:
    for arguments in ("Rome", "[1, 2]", '{"city": "Ro', 3):
        with golden.raises(TaskError, match="row 1: message 2"):
            called(arguments=arguments)


@pytest.mark.parametrize(
    "answer",
    [
        {"tool_calls": json.dumps([CALL])},
        {"tool_calls": [{"name": "get", "arguments": '{"city": "Rome"}'}]},
        {"function_call": {"name": "get", "arguments": '{"city": "Rome"}'}},
        {"tool_calls": [json.dumps(CALL)]},
        {"tool_calls": [{"type": "function", "function": json.dumps(CALL["function"])}]},
    ],
)
def test_calls_of_other_forms_become_calls(answer: dict[str, Any]) -> None:
    found = Prompts([{"prompt": [ASKS, {"role": "assistant", "content": "", **answer}]}], "p").row(0).prompt
    assert found[1]["tool_calls"] == [CALL]


def test_calls_that_are_none_are_refused() -> None:
    for calls in (["get"], [{"function": {"arguments": {}}}], "get"):
        with golden.raises(TaskError, match="row 1: message 2.*tool_calls"):
            Prompts([{"prompt": [ASKS, {"role": "assistant", "content": "", "tool_calls": calls}]}], "p")


def test_no_null_of_shared_columns_is_left_in_messages_and_schemas(tmp_path: Path) -> None:
    table = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def schema(name: str, **properties: Any) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
        }

    def call(**arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "get", "arguments": arguments}}

    rows = [
        {
            "prompt": [ASKS, {"role": "assistant", "content": "", "tool_calls": [call(**{name: {"of": "Rome"}})]}],
            "tools": [schema(name, **{name: {"type": "string", **more}})],
        }
        for name, more in (("x", {}), ("y", {"enum": ["a"]}))
    ]
    parquet.write_table(table.Table.from_pylist(rows), tmp_path / "p.parquet")
    found = load_prompts(str(tmp_path / "p.parquet"))
    for number, row in enumerate(rows):
        assert found.row(number).prompt == row["prompt"]
        assert found.row(number).columns["tools"] == row["tools"]


def test_null_is_left_only_where_a_schema_that_is_text_means_it() -> None:
    schema = {"name": "f", "parameters": {"properties": {"x": {"default": None, "enum": ["a", None]}, "y": None}}}
    (found,) = Prompts([{"prompt": [ASKS], "tools": json.dumps([schema])}], "p").row(0).columns["tools"]
    whole = {"name": "f", "parameters": {"properties": {"x": {"default": None, "enum": ["a", None]}}}}
    assert found == {"type": "function", "function": whole}


def test_messages_of_sharegpt_become_messages() -> None:
    sent = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "1 + 1?"}]
    for given in (sent, json.dumps(sent), repr(sent)):
        row = Prompts([{"prompt": given}], "p").row(0)
        assert row.prompt == row.columns["prompt"] == [{"role": "system", "content": "Be brief."}, ASKS]
    with golden.raises(TaskError, match='row 1: message 1.*"judge"'):
        Prompts([{"prompt": [{"from": "judge", "value": "x"}]}], "p")


SEVERAL = [{"role": "user", "content": "What's 1 + 1?\n[{'a': 1}]"}, {"role": "user", "content": 'é \\ "q" }\n {'}]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(SEVERAL, indent=1),
        " \n" + json.dumps(SEVERAL),
        "\ufeff" + json.dumps(SEVERAL),
        json.dumps(SEVERAL, ensure_ascii=False, separators=(",", ":")),
        json.dumps(json.dumps(SEVERAL)),
        json.dumps(json.dumps(json.dumps(SEVERAL))),
        json.dumps([dict(sorted(each.items())) for each in SEVERAL]),
        repr(SEVERAL),
        repr([dict(sorted(each.items())) for each in SEVERAL]),
        repr(tuple(SEVERAL)),
        str(np.array(SEVERAL, dtype=object)),
        str(np.array([dict(sorted(each.items())) for each in SEVERAL], dtype=object)),
        repr(np.array(SEVERAL, dtype=object)),
        json.dumps([{**each, "name": None, "tool_calls": None} for each in SEVERAL]),
        repr([{"name": None, **each} for each in SEVERAL]),
    ],
)
def test_messages_are_read_from_each_writing_of_json_python_and_pandas(text: str) -> None:
    assert Prompts([{"prompt": text}], "p").row(0).prompt == SEVERAL


def test_arrays_within_messages_are_lists() -> None:
    parts = np.array([{"type": "text", "text": "1 + 1?"}], dtype=object)
    text = str(np.array([{"content": parts, "role": "user"}], dtype=object))
    assert "array(" in text
    assert Prompts([{"prompt": text}], "p").row(0).prompt == [ASKS]


@pytest.mark.parametrize(
    "text",
    [
        '[{"role": "user", "content": "hi"}',
        "[{'role': 'user', 'content': 'hi'",
        '[{"role": "us',
        "[{'content': 'hi', 'role': 'user'} ...]",
        '[{"id": 3, "role": "user", "content": "hi"},',
        "[{'from': 'human', 'value': datetime.date(2026, 1, 1)}]",
        "[{'content': 'a' + 'b', 'role': 'user'}]",
    ],
)
def test_a_text_that_begins_like_messages_and_holds_none_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": each}) for each in ("hi", text)))
    with pytest.raises(TaskError, match=r"rows\.jsonl, line 2: this text begins like messages, which it does not hold"):
        load_prompts(str(file))


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "[{",
        "[{'a': 1}, {'a': 2}] is a list. Sort it.",
        '[{"name": "x", "role": "admin"}]',
        "[{'role': 'admin', 'id': 3}] What does this print?",
        "[{'value': 3}, {'value': 5}] What is the sum?",
        '"[{" begins a list of tables in JSON.',
        '{"a": 1}',
        "array([1, 2])",
        "[]",
        "['role', 'content']",
    ],
)
def test_a_text_that_only_looks_a_little_like_messages_stays_a_text(text: str) -> None:
    assert Prompts([{"prompt": text}], "p").row(0).prompt == text


CONVERSATION = [SAYS := {"role": "system", "content": "Be brief."}, ASKS, {"role": "assistant", "content": "2"}]
SENT = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]


@pytest.mark.parametrize(
    ("column", "given", "asked"),
    [
        ("messages", CONVERSATION, [SAYS, ASKS]),
        ("messages", json.dumps(CONVERSATION), [SAYS, ASKS]),
        ("messages", [*CONVERSATION, ASKS, CONVERSATION[-1]], [*CONVERSATION, ASKS]),
        ("conversations", SENT, [ASKS]),
        ("conversations", repr(SENT), [ASKS]),
        ("messages", [ASKS], [ASKS]),
    ],
)
def test_the_last_answer_of_a_conversation_is_wanted_and_no_beginning(column: str, given: Any, asked: Any) -> None:
    row = load_prompts([{column: given}], columns={"prompt": column}).row(0)
    assert row.prompt == row.columns["prompt"] == asked
    assert row.columns.get("answer") == (None if given == [ASKS] else "2")


def test_a_row_keeps_its_own_answer_and_a_column_prompt_its_beginning() -> None:
    row = {"messages": CONVERSATION, "answer": "two"}
    assert load_prompts([row], columns={"prompt": "messages"}).row(0).columns["answer"] == "two"
    assert load_prompts([{"prompt": CONVERSATION}]).row(0).prompt == CONVERSATION


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_rows_of_conversations_name_the_mapping_that_works(column: str) -> None:
    told = rf'the closest is "{column}", of which all before its last answer is asked: write task.columns = '
    with pytest.raises(TaskError, match=told + rf'\{{ prompt = "{column}" \}}'):
        load_prompts([{column: CONVERSATION}])
    with golden.raises(TaskError, match="row 1"):
        load_prompts([{column: CONVERSATION[-1:]}], columns={"prompt": column})


def test_a_column_of_another_case_in_a_later_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n{"Prompt": "b", "answer": "1"}\n')
    told = 'line 2: there is no column "prompt"; found are Prompt, answer; line 1 has it, and "Prompt" is another name'
    with pytest.raises(TaskError, match=re.escape(told)):
        load_prompts(str(file))


def calling(*ids: str | None) -> dict[str, Any]:
    calls = [{"function": {"name": "get"}} | ({"id": each} if each else {}) for each in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(call: str | None) -> dict[str, Any]:
    return {"role": "tool", "content": f"of {call}"} | ({"tool_call_id": call} if call else {})


@pytest.mark.parametrize(
    ("ids", "given", "expected"),
    [
        ("ab", "ba", "ab"),
        ("ab", "ab", "ab"),
        ("abc", "cab", "abc"),
        ("abc", "ca", "ac"),
        ("ba", "ab", "ba"),
        ((None, None), "ba", "ba"),
        ("ab", ("b", None), ("b", None)),
    ],
)
def test_results_of_calls_stand_in_the_order_of_the_calls(
    ids: Sequence[str | None], given: Sequence[str | None], expected: Sequence[str | None]
) -> None:
    asked = {"role": "user", "content": "hi"}
    ends = {"role": "assistant", "content": "so"}
    later = [ends, calling("d", "c"), result("c"), result("d")]
    found = in_one_form([asked, calling(*ids), *map(result, given), *later], "")
    assert found[2 : 2 + len(given)] == [*map(result, expected)]
    assert found[-2:] == [result("d"), result("c")]


def test_a_result_of_no_call_is_refused() -> None:
    for given in ("bx", "x", "ax"):
        with golden.raises(TaskError, match=f"line 1: message {2 + given.index('x')}.*'x'"):
            in_one_form([calling("a", "b"), *map(result, given)], "r.jsonl, line 1")
