"""Calls in the forms that models write, and answers that nobody would write but an adversary."""

import json
import random
import sys
from types import FrameType
from typing import Any

import pytest

from asyncrl.environments.tools import FORMS, ToolCall, ToolCalls
from asyncrl.environments.tools.call_formats import form_named
from asyncrl.environments.tools.parsed_calls import DEEPEST, LARGEST, MOST
from asyncrl.errors import ConfigError
from tests import golden

ADD = ToolCall("add", {"a": 1, "b": [2, {"c": None}]})


def parsed(form: str, text: str) -> ToolCalls:
    return FORMS[form].parse(text)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("The answer is 4.", "The answer is 4.", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [ToolCall("f", {"a": 1})]),
        ('Well. <tool_call>{"name": "f", "arguments": {}}</tool_call> So.', "Well.\nSo.", [ToolCall("f")]),
        (
            '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
            "",
            [ToolCall("f"), ToolCall("g")],
        ),
        ('<tool_call>{"name": "f", "arguments": null}', "", [ToolCall("f")]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}', "", [ToolCall("f", {"a": 1})]),
        (r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', "", [ToolCall("f", {"a": 1})]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}{"}}</tool_call>',
            "",
            [ToolCall("f", {"a": "</tool_call>}{"})],
        ),
        ('```json\n<tool_call>{"name": "f"}</tool_call>\n```', "", [ToolCall("f")]),
        (
            '<think>I could <tool_call>{"name": "f"}</tool_call></think>4',
            '<think>I could <tool_call>{"name": "f"}</tool_call></think>\n4',
            [],
        ),
        (
            '<tool_call>{"name": "g"}</tool_call><think>perhaps <tool_call>{"name": "f"}</tool_call></think>4',
            '<tool_call>{"name": "g"}</tool_call><think>perhaps <tool_call>{"name": "f"}</tool_call></think>\n4',
            [],
        ),
        (
            'I could <tool_call>{"name": "f"}</tool_call></think>4',
            'I could <tool_call>{"name": "f"}</tool_call></think>\n4',
            [],
        ),
        ("<think>without an end <tool_call>", "<think>without an end <tool_call>", []),
        (
            '<tool_call>{"name": "größe", "arguments": {"ü": "日本\\u00e9"}}</tool_call>',
            "",
            [ToolCall("größe", {"ü": "日本é"})],
        ),
        ("", "", []),
    ],
)
def test_hermes(text: str, content: str, calls: list[ToolCall]) -> None:
    assert parsed("hermes", text) == ToolCalls(content, tuple(calls))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("The answer is 4.", "The answer is 4.", []),
        ('{"name": "f", "parameters": {"a": 1}}', "", [ToolCall("f", {"a": 1})]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", [ToolCall("f")]),
        ('<|python_tag|>{"name": "f"}', "", [ToolCall("f")]),
        ('Well:\n{"name": "f", "parameters": {}}\nSo.', "Well:\nSo.", [ToolCall("f")]),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [ToolCall("f"), ToolCall("g")]),
        ('{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}};', "", [ToolCall("f"), ToolCall("g")]),
        ('{"type": "function", "name": "f", "parameters": {}}', "", [ToolCall("f")]),
        ('```json\n{"name": "f", "parameters": {}}\n```', "", [ToolCall("f")]),
        ('{"name": "f", "parameters": {"a": "}; {\\""}}', "", [ToolCall("f", {"a": '}; {"'})]),
        ('{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),
        ('{"answer": 4}', '{"answer": 4}', []),
        ('See {"name": "f", "parameters": {}}', 'See {"name": "f", "parameters": {}}', []),
    ],
)
def test_llama3(text: str, content: str, calls: list[ToolCall]) -> None:
    assert parsed("llama3", text) == ToolCalls(content, tuple(calls))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("The answer is 4.", "The answer is 4.", []),
        ("[f()]", "", [ToolCall("f")]),
        ("Sure.<|python_start|>[f()]<|python_end|>Done", "Sure.\nDone", [ToolCall("f")]),
        (
            '[f(a=1, b="x"), m.g(c=[1, -2.5, +3], d={"k": None})]',
            "",
            [ToolCall("f", {"a": 1, "b": "x"}), ToolCall("m.g", {"c": [1, -2.5, 3], "d": {"k": None}})],
        ),
        ("<|python_start|>[f(a=True)]<|python_end|>", "", [ToolCall("f", {"a": True})]),
        ("Well:\n[\n  f(\n    a=0x10,\n  ),\n]\nSo.", "Well:\nSo.", [ToolCall("f", {"a": 16})]),
        ("```python\n[f(a=1_000)]\n```", "", [ToolCall("f", {"a": 1000})]),
        ("[f(a=(1, 2), b=(1), c=(), d=(1,))]", "", [ToolCall("f", {"a": [1, 2], "b": 1, "c": [], "d": [1]})]),
        (
            "[f(a='\\'\"', b=r'\\d', c='''x\n'y''', d='\\d')]",
            "",
            [ToolCall("f", {"a": "'\"", "b": "\\d", "c": "x\n'y", "d": "\\d"})],
        ),
        ("[f(a=1e-3, b=.5, c=2.)]", "", [ToolCall("f", {"a": 0.001, "b": 0.5, "c": 2.0})]),
        ("[f(a='])')]", "", [ToolCall("f", {"a": "])"})]),
        ("[1, 2, 3]", "[1, 2, 3]", []),
        ("as [f(a=1)] says", "as [f(a=1)] says", []),
    ],
)
def test_pythonic(text: str, content: str, calls: list[ToolCall]) -> None:
    assert parsed("pythonic", text) == ToolCalls(content, tuple(calls))


MISTAKES = [
    ("hermes", "<tool_call>{", "no valid JSON"),
    ("hermes", "<tool_call></tool_call>", "no valid JSON"),
    ("hermes", "<tool_call>f(1)</tool_call>", "no valid JSON: Expecting value, at character 0, near 'f\\(1\\)'"),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "no valid JSON"),
    ("hermes", "<tool_call>[]</tool_call>", r"a call is an object with a name and arguments; this is '\[\]'"),
    ("hermes", '<tool_call>{"name": 1}</tool_call>', 'a call has a "name", the name of a tool'),
    ("hermes", '<tool_call>{"name": ""}</tool_call>', 'a call has a "name", the name of a tool'),
    ("hermes", '<tool_call>{"name": "f", "args": {}}</tool_call>', "that of 'f' has 'args'"),
    ("hermes", '<tool_call>{"name": "f", "arguments": 3}</tool_call>', "the arguments of 'f' are an object, .* '3'"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>', "write one of them"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "has NaN, which is no number"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": -Infinity}}</tool_call>', "-Infinity, which is no number"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "'1e999', which is too large"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>' % ("9" * 5000), "number of 5000 digits"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "the key 'a' twice"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "half of a surrogate pair"),
    ("hermes", '<tool_call>{"name": "f"} or so</tool_call>', "no valid JSON: Extra data"),
    ("hermes", '<tool_call>{"name": "f\n"}</tool_call>', "no valid JSON: Invalid control character"),
    ("llama3", '{"name": "f", "parameters": {"a": 1}', "no valid JSON"),
    ("llama3", "<|python_tag|>f(a=1)", "no valid JSON"),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": tru}}', "no valid JSON"),
    ("pythonic", "[f(1)]", "expected the name of an argument, since arguments are given by name, found '1'"),
    ("pythonic", "[f(a=1", r"expected \), found the end of the answer"),
    ("pythonic", "[f(a=x)]", "expected a value, found 'x'; texts have quotes"),
    ("pythonic", "[f(a=g(b=1))]", "expected a value, found 'g'"),
    ("pythonic", "[f(a=1, a=2)]", "the argument 'a' is given twice"),
    ("pythonic", "[f(a={1: 2})]", "keys of an object are different texts, '1' is not"),
    ("pythonic", "[f(a={'k': 1, 'k': 2})]", "keys of an object are different texts, 'k' is not"),
    ("pythonic", "[f(a=1j)]", "a number is too large or complex"),
    ("pythonic", "[f(a=1e999)]", "a number is too large or complex"),
    ("pythonic", "[f(a=0x%s)]" % ("f" * 5000), "a number is too large or complex"),
    ("pythonic", "[f(a=%s)]" % ("9" * 5000), "is no valid number"),
    ("pythonic", "[f(a=0777)]", "'0777' is no valid number"),
    ("pythonic", "[f(a=b'x')]", "expected a value, found 'b'"),
    ("pythonic", "[f(a=f'{x}')]", "expected a value, found 'f'"),
    ("pythonic", "[f(a='x\ny')]", "expected a value, found"),
    ("pythonic", "[f(a='\\ud800')]", "is no valid text"),
    ("pythonic", "[f(a='\\N{nothing}')]", "is no valid text"),
    ("pythonic", "[f(a='\0')]", "is no valid text"),
    ("pythonic", "[f(a=--1)]", "expected a number, found '-'"),
    ("pythonic", "[f(a=1 if 1 else 2)]", r"expected \), found 'if'"),
    ("pythonic", "[f(a=1+1)]", r"expected \), found '\+'"),
    ("pythonic", "[f(**{})]", r"expected the name of an argument.*found '\*\*"),
    ("pythonic", "[f(a=1) g()]", r"expected \], found 'g'"),
    ("pythonic", "[f(a=__import__('os').system('id'))]", "expected a value, found '__import__'"),
]


@pytest.mark.parametrize(("form", "text", "message"), MISTAKES, ids=[str(number) for number in range(len(MISTAKES))])
def test_a_malformed_call_is_a_mistake(form: str, text: str, message: str) -> None:
    found = parsed(form, text)
    assert found.calls == ()
    (mistake,) = found.mistakes
    assert_matches(mistake, message)
    assert "; write " in mistake
    assert len(mistake) < 400


def assert_matches(text: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


def test_calls_around_a_malformed_one_are_read() -> None:
    good = FORMS["hermes"].render([ADD])
    found = parsed("hermes", f'{good}<tool_call>{{"name": "f", "arguments": {{"a: 1}}}}</tool_call>{good} end')
    assert (found.content, found.calls, len(found.mistakes)) == ("end", (ADD, ADD), 1)
    broken = parsed("llama3", '{"name": "f", "parameters": {"a": x}}; ' + FORMS["llama3"].render([ADD]))
    assert (broken.calls, len(broken.mistakes)) == ((ADD,), 1)


def test_an_answer_has_at_most_so_many_calls() -> None:
    for form, separator in {"hermes": "", "llama3": ";"}.items():
        one = FORMS[form].render([ToolCall("f")])
        found = parsed(form, separator.join([one] * (MOST + 9)))
        assert len(found.calls) == MOST
        assert len(found.content) == (len(one) + len(separator)) * 9 - len(separator)
    assert (
        "more than 128 calls" in parsed("pythonic", FORMS["pythonic"].render([ToolCall("f")] * (MOST + 1))).mistakes[0]
    )


def test_the_deepest_call_is_read_and_a_deeper_one_is_a_mistake() -> None:
    for form, own in {"hermes": 2, "llama3": 2, "pythonic": 1}.items():
        value: Any = 1
        for _ in range(DEEPEST - own):
            value = [value]
        call = ToolCall("f", {"a": value})
        assert parsed(form, FORMS[form].render([call])).calls == (call,)
        deeper = parsed(form, FORMS[form].render([ToolCall("f", {"a": [[value]]})]))
        assert deeper.calls == ()
        assert "more than 64 deep" in deeper.mistakes[0]


HOSTILE = [
    *("[", "{", '"', "\\", "(", "-", "not ", "[f(", "[f(a=", "[f(a=[", '{"a":', '{"name":', '{"name":"f"', "a."),
    *("<tool_call>", '<tool_call>{"</tool_call>', "<tool_call>{", '<tool_call>{"', '<tool_call>{"a":"</tool_call>"}'),
    *("</tool_call>", '\n{"name":', '\n{"name":"', '{"type":', '{"name":"f","parameters":{}};', "\n[f(a='", "\n[f()]"),
    *('\n[f(a="""', "\n[f()]'''", "[f()] ", "[f(a=-", "[f(a=0x", "[f(a='", "<|python_tag|>", "<|python_tag|>{"),
    *("<think>", "\t", "\n", " ", "\0", "😀", "```", "'''"),
]


def lines_run(form: str, text: str) -> int:
    """Counts the lines of code that a parser runs: a measure that no other process changes. What a regular expression
    does inside is not counted; one that is not linear runs into the time limit of tests."""
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        parsed(form, text)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", HOSTILE)
def test_no_answer_breaks_a_parser_or_costs_more_than_its_length(form: str, part: str) -> None:
    for closing in ("", "}", "]", ")]"):
        found = parsed(form, part * (LARGEST // len(part) - 2) + closing)
        assert len(found.calls) + len(found.mistakes) <= MOST
    parts = 2**16 // len(part)
    assert lines_run(form, part * parts) <= 30 * parts + 40 * MOST


@pytest.mark.parametrize("form", FORMS)
def test_a_longer_answer_is_not_read(form: str) -> None:
    text = FORMS[form].render([ToolCall("f", {"a": "x" * LARGEST})])
    assert parsed(form, text).content == text
    assert f"at most {LARGEST} are read" in parsed(form, text).mistakes[0]


PIECES = [
    *("", "x", "</tool_call>", "<tool_call>", "}", '"', "'", "\\", "\n", "{", "[f()]", "; ", "<think>", "</think>"),
    *("```", "é日😀", "\u2028", "\t", "\x7f", "<|python_tag|>", "NaN", "$", '"""', "'''"),
]


def value(draw: random.Random, depth: int = 0) -> Any:
    match draw.randrange(9 if depth < 4 else 7):
        case 0:
            return draw.choice([True, False, None])
        case 1:
            return draw.choice([0, -1, 7, 10**30, -(2**63)])
        case 2:
            return draw.choice([0.5, -1.25, 1e22, 1e-300, draw.random()])
        case 3 | 4 | 5 | 6:
            return text(draw)
        case 7:
            return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {text(draw): value(draw, depth + 1) for _ in range(draw.randrange(4))}


def text(draw: random.Random) -> str:
    return "".join(draw.choice(PIECES) for _ in range(draw.randrange(6)))


def call(draw: random.Random) -> ToolCall:
    name = draw.choice(["f", "get_weather", "größe", "shop.price"])
    return ToolCall(name, {draw.choice("abcdeü"): value(draw) for _ in range(draw.randrange(4))})


@pytest.mark.parametrize("form", FORMS)
def test_what_is_rendered_is_parsed_as_it_was(form: str) -> None:
    for seed in range(400):
        draw = random.Random(seed)
        calls = tuple(call(draw) for _ in range(draw.randrange(1, 4)))
        content = draw.choice(["", "I ask.", "Two\nlines:"])
        written = "\n".join([content, FORMS[form].render(calls)]) if content else FORMS[form].render(calls)
        assert parsed(form, written) == ToolCalls(content, calls), (seed, written)


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_answer_is_read_or_is_a_mistake(form: str) -> None:
    for seed in range(400):
        draw = random.Random(seed)
        written = list(FORMS[form].render([call(draw) for _ in range(2)]))
        for _ in range(draw.randrange(1, 6)):
            written[draw.randrange(len(written))] = draw.choice([*PIECES, "[", "(", ",", "="])
        found = parsed(form, "".join(written))
        for each in found.calls:
            json.dumps(each.arguments).encode()
            assert each.name


def test_an_unknown_form_is_named() -> None:
    with golden.raises(ConfigError, match=r"mean hermes\?"):
        form_named("herms", "environment.options.form")


@pytest.mark.parametrize("form", FORMS)
def test_calls_in_thoughts_are_none_whoever_opened_them(form: str) -> None:
    asked = FORMS[form].render([ToolCall("ask", {})])
    wiped = FORMS[form].render([ToolCall("wipe", {})])
    for text in (f"Sure.\n<think>\n{wiped}\n</think>\n{asked}", f"no\n{wiped}\n</think>\n{asked}"):
        assert [call.name for call in FORMS[form].parse(text).calls] == ["ask"], text
    assert FORMS[form].parse(f"\n{wiped}", opened=True).calls == ()
    assert [call.name for call in FORMS[form].parse(f"no</think>\n{asked}", opened=True).calls] == ["ask"]
    quoted = ToolCall("write", {"text": "say <think> first"})
    assert FORMS[form].parse(FORMS[form].render([quoted])).calls == (quoted,)
