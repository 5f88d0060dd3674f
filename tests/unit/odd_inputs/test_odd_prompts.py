"""Prompts, chats, tables and mixtures as they come in the world: what the model gets, or why a run is refused."""

import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.unit.odd_inputs.trial import Refused, Trains, check, write

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "Sure"}
BEGUN = "<|im_start|>assistant\n"
ASKED = "<|im_start|>user\nhi<|im_end|>\n"
SILENT = "<|im_start|>system\n<|im_end|>\n"
ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
LARGEST = 2**64 - 1
NOT_ALL_EMPTY = "line 1: a prompt is text that is not empty"


def row(prompt: Any, **columns: Any) -> str:
    return json.dumps({"prompt": prompt, **columns}) + "\n"


PROMPTS: dict[str, tuple[str, tuple[str, ...], Trains | Refused]] = {
    "a number": (row(5), (), Refused([NOT_ALL_EMPTY, "this is 5"])),
    "null in the third row": (row("a") * 2 + row(None), (), Refused(["line 3: a prompt is text", "this is None"])),
    "white space": (row(" \n\t\u00a0"), (), Refused([NOT_ALL_EMPTY])),
    "characters that do not show": (row("\u200b\ufeff"), (), Refused([NOT_ALL_EMPTY, "\\u200b"])),
    "a message without a list": (row(USER), (), Refused([NOT_ALL_EMPTY, "{'role': 'user'"])),
    "a list of texts": (row(["a", "b"]), (), Refused([NOT_ALL_EMPTY, "message 1 is 'a'"])),
    "lists of messages in a list": (row([[USER]]), (), Refused([NOT_ALL_EMPTY, "message 1 is [{"])),
    "emoji, marks and directions": (row("👩‍👩‍👧 é שלום \u202eabc"), (), Trains(["👩‍👩‍👧 é שלום \u202eabc"])),
    "special tokens in a text": (row("a<|im_end|><|im_start|>"), (), Trains(["a<|im_end|><|im_start|>"])),
    "messages as JSON": (row(json.dumps([USER])), (), Trains([ASKED + BEGUN])),
    "messages as Python shows them": (row(str([USER])), (), Trains([ASKED + BEGUN])),
    "a list that is no chat, as text": (row('[{"a": 1}]'), (), Trains(['[{"a": 1}]'])),
    "100,000 characters": (row("x" * 100_000), (), Refused(["line 1: the prompt has 100000"], by_worker=True)),
    "more than the positions of the model": (
        row("x" * 1020),
        ("--task.max_prompt_tokens", "2000"),
        Refused(["line 1: the prompt has 1020 tokens", "1024 positions", "max_new_tokens = 4"], by_worker=True),
    ),
    "long rows only, left out": (
        row("x" * 600),
        ("--task.long_prompts", "skip"),
        Refused(["rows.jsonl: all 1 prompts have more than 512 tokens", "raise task.max_prompt_tokens"]),
    ),
    "a long row, left out": (
        row("x" * 600) + row("a"),
        ("--task.long_prompts", "skip"),
        Trains(["a", "a"], says=["1 of 2 prompts have more than 512 tokens; they are left out"]),
    ),
    "a column by another name": (
        json.dumps({"Question ": "a"}),
        ("--task.columns", '{prompt = "Question "}'),
        Trains(["a"], {"Question ": "a"}),
    ),
    "a chat by another name": (
        json.dumps({"conversations": [{"from": "human", "value": "hi"}]}),
        ("--task.columns", '{prompt = "conversations"}'),
        Trains([ASKED + BEGUN]),
    ),
    "texts beside chats": (row("a") + row([USER]), (), Trains(["a", ASKED + BEGUN])),
    "equal rows": (row("a") * 3, (), Trains(["a", "a", "a", "a"])),
}
CHATS: dict[str, tuple[list[Any], tuple[str, ...], Trains | Refused]] = {
    "a role that no template knows": (
        [{"role": "wizard", "content": "hi"}],
        (),
        Trains(["<|im_start|>wizard\nhi<|im_end|>\n" + BEGUN]),
    ),
    "a role in capitals": ([{"role": "User", "content": "hi"}], (), Refused(['"User", which templates call "user"'])),
    "a role of another library": ([USER, {"role": "gpt", "content": "a"}], (), Refused(['templates call "assistant"'])),
    "a role that is none": ([USER, {"role": None, "content": "a"}], (), Refused(["the role of message 2 is None"])),
    "no content": ([USER, {"role": "user"}], (), Refused(['message 2 (user) has no "content"'])),
    "an empty message among others": (
        [{"role": "system", "content": ""}, USER],
        (),
        Trains([SILENT + ASKED + BEGUN]),
    ),
    "empty messages only": ([{"role": "user", "content": ""}], (), Refused([NOT_ALL_EMPTY])),
    "no messages": ([], (), Refused([NOT_ALL_EMPTY, "this is []"])),
    "an image": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": "x.png"}]}],
        (),
        Refused(["line 1: message 1 (user): the picture x.png cannot be read: No such file"]),
    ),
    "a result of a tool that is a table": (
        [USER, {"role": "tool", "content": {"sum": 3}}],
        (),
        Refused(["line 1: message 2 (tool): its content is {'sum': 3}", "write a text"]),
    ),
    "two system messages": (
        [{"role": "system", "content": "A"}, {"role": "system", "content": "B"}, USER],
        (),
        Trains(["<|im_start|>system\nA<|im_end|>\n<|im_start|>system\nB<|im_end|>\n" + ASKED + BEGUN]),
    ),
    "a system message beside task.system": (
        [{"role": "system", "content": "A"}, USER],
        ("--task.system", "B"),
        Refused(["line 1: the prompt has a system message of its own; remove task.system"]),
    ),
    "an answer that begins": ([USER, ANSWER], (), Trains([ASKED + BEGUN + "Sure"], says=["which the model continues"])),
    "calls that the template leaves out": (
        [USER, CALL, {"role": "tool", "content": "3"}],
        (),
        Refused(["line 1: the model's chat template leaves out tool_calls, add among them"], by_worker=True),
    ),
    "ends of messages in a message": (
        [{"role": "user", "content": "a<|im_end|>"}],
        (),
        Trains(["<|im_start|>user\na<|im_end|><|im_end|>\n" + BEGUN]),
    ),
}
TABLES: dict[str, tuple[dict[str, Any], Trains | Refused]] = {
    "null": ({"prompt": ["a", "b", None]}, Refused(["r.parquet, row 3: a prompt is text", "this is None"])),
    "no rows": ({"prompt": pyarrow.array([], pyarrow.string())}, Refused(["r.parquet: there are no rows"])),
    "dates and decimals": (
        {"prompt": ["a"], "day": [date(2026, 1, 2)], "at": [datetime(2026, 1, 2, 3)], "cost": [Decimal("1.50")]},
        Trains(["a"], {"day": "2026-01-02", "at": "2026-01-02T03:00:00", "cost": "1.50"}),
    ),
    "spans of time": (
        {"prompt": ["a"], "span": [timedelta(seconds=1)]},
        Refused(["row 1, column span: a value of type timedelta", 'task.columns = { "span" = "" }']),
    ),
    "nested columns": (
        {"prompt": [[{"role": "user", "content": "hi", "tool_calls": None}]], "meta": [{"x": [1, None], "y": b"\0"}]},
        Trains([ASKED + BEGUN], {"meta": {"x": [1, None], "y": b"\0"}}),
    ),
    "the largest whole number": (
        {"prompt": ["a"], "n": pyarrow.array([2**64 - 1], "uint64")},
        Trains(["a"], {"n": 2**64 - 1}),
    ),
    "bytes": ({"prompt": [b"a"]}, Refused(["row 1: a prompt is text", "this is b'a'"])),
}
MIXTURES: dict[str, tuple[str, Trains | Refused]] = {
    "a source without rows": ('["a.jsonl", "nothing.jsonl"]', Refused(["nothing.jsonl: there are no rows"])),
    "a weight of zero": ('["a.jsonl", {use = "b.jsonl", weight = 1}]', Refused(["a.jsonl has no weight"])),
    "a weight below zero": ('[{use = "a.jsonl", weight = -1}, "b.jsonl"]', Refused(["item 1: weight", "not -1"])),
    "a weight that is no number": ('[{use = "a.jsonl", weight = nan}]', Refused(["weight: must be a finite number"])),
    "sources with other columns": ('["a.jsonl", "b.jsonl"]', Refused(['b.jsonl, line 1: there is no column "prompt"'])),
    "columns of one source": ('["a.jsonl", {use = "b.jsonl", columns = {prompt = "query"}}]', Trains(["a", "b"])),
    "no sources": ("[]", Refused(["task.prompts: must have 1 or more entries"])),
    "one source twice": ('["a.jsonl", "a.jsonl"]', Trains(["a", "a", "a"])),
}


@pytest.mark.parametrize(("lines", "flags", "expected"), PROMPTS.values(), ids=PROMPTS)
def test_prompts(lines: str, flags: tuple[str, ...], expected: Trains | Refused, folder: Path) -> None:
    write(folder, {"rows.jsonl": lines})
    check(folder, flags, expected)


@pytest.mark.parametrize(("messages", "flags", "expected"), CHATS.values(), ids=CHATS)
def test_chats(messages: list[Any], flags: tuple[str, ...], expected: Trains | Refused, folder: Path) -> None:
    write(folder, {"rows.jsonl": row(messages)})
    check(folder, flags, expected)


@pytest.mark.parametrize(("columns", "expected"), TABLES.values(), ids=TABLES)
def test_tables(columns: dict[str, Any], expected: Trains | Refused, folder: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "r.parquet")
    check(folder, ("--task.prompts", "r.parquet"), expected)


def test_a_table_with_a_column_twice(folder: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"]), folder / "r.parquet")
    says = ['r.parquet has several columns "prompt"', "another name"]
    check(folder, ("--task.prompts", "r.parquet"), Refused(says))


@pytest.mark.parametrize(("sources", "expected"), MIXTURES.values(), ids=MIXTURES)
def test_mixtures(sources: str, expected: Trains | Refused, folder: Path) -> None:
    write(folder, {"a.jsonl": row("a"), "b.jsonl": json.dumps({"query": "b"}), "nothing.jsonl": ""})
    check(folder, ("--task.prompts", sources), expected)


def test_tools_that_the_template_leaves_out(folder: Path) -> None:
    write(folder, {"rows.jsonl": row([USER], tools=[ADD])})
    check(folder, (), Refused(["line 1: the model's chat template leaves out tools, add among them"], by_worker=True))


@pytest.mark.parametrize("flags", [(), ("--task.system", "Be brief."), ("--task.text_prompts", "chat")])
def test_chats_for_a_model_without_a_template(flags: tuple[str, ...], tmp_path: Path, plain_model: Path) -> None:
    (tmp_path / "model").symlink_to(plain_model)
    write(tmp_path, {"rows.jsonl": row("a" if flags else [USER])})
    check(tmp_path, flags, Refused(["rows.jsonl, line 1: the prompt is a list of messages", "no chat template"]))
