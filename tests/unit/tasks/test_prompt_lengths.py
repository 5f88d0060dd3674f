"""Prompts with more tokens than there is room for: left out, shortened or refused, and counted by another process; a
token is a character."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks import Draw
from asyncrl.tasks.prompt_lengths import (
    COUNTED,
    LOOKED_AT,
    TokenBudget,
    fitting,
    refuse_what_has_no_room,
    write_longest,
)
from asyncrl.tasks.prompt_rows import MixedPrompts, Prompts
from tests import golden


def texts(*given: str) -> Prompts:
    return Prompts([{"prompt": text, "n": number} for number, text in enumerate(given)], "p")


def prompts(*lengths: int) -> Prompts:
    return Prompts([{"prompt": "x" * length} for length in lengths], "p.jsonl")


def counted(path: Path, most: int) -> list[int]:
    """Lengths of the prompts whose tokens were counted; a token is a character."""
    seen: list[int] = []

    def tokenize(prompt: Any, tools: Any) -> Sequence[int]:
        seen.append(len(prompt))
        return range(len(prompt))

    refuse_what_has_no_room(path, tokenize, TokenBudget(most, 8))
    return seen


def test_the_longest_are_counted_and_fit(tmp_path: Path) -> None:
    write_longest(tmp_path / "l", {"p": prompts(*range(1, 201)), "held out": prompts(7)})
    assert counted(tmp_path / "l", 200) == [*range(200, 200 - COUNTED, -1), 7]


def test_the_row_and_the_remedy_are_named(tmp_path: Path) -> None:
    write_longest(tmp_path / "l", {"task.prompts": prompts(5, 30, 4, 21)})
    with pytest.raises(TaskError) as error:
        counted(tmp_path / "l", 20)
    for expected in ("task.prompts: p.jsonl, row 2: the prompt has 30 tokens", "max_prompt_tokens = 30", "1 more"):
        assert expected in str(error.value)


def test_messages_are_counted_by_their_contents(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "x" * length}]} for length in (3, 90, 2)]
    write_longest(tmp_path / "l", {"p": Prompts(rows, "p")})
    with golden.raises(TaskError, match="row 2.*90 tokens"):
        refuse_what_has_no_room(tmp_path / "l", lambda prompt, _: prompt[0]["content"], TokenBudget(50, 8))


def test_a_large_source_is_looked_at_here_and_there(tmp_path: Path) -> None:
    class Many(Sequence[dict[str, str]]):
        looked_at = 0

        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, number: Any) -> Any:
            self.looked_at += 1
            return {"prompt": str(number)}

    rows = Many()
    write_longest(tmp_path / "l", {"p": Prompts(rows, "p")})
    assert rows.looked_at <= LOOKED_AT + COUNTED + 1
    assert max(counted(tmp_path / "l", 9)) == 9


def test_a_prompt_that_cannot_be_rendered_is_named(tmp_path: Path) -> None:
    def tokenize(prompt: Any, tools: Any) -> Sequence[int]:
        if not isinstance(prompt, str):
            raise TaskError("there is no chat template")
        return range(3)

    rows: list[dict[str, Any]] = [{"prompt": "a long text"}] * (COUNTED + 3)
    rows[COUNTED + 1] = {"prompt": [{"role": "user", "content": "hi"}]}  # far from the longest
    write_longest(tmp_path / "l", {"task.prompts": Prompts(rows, "p")})
    with golden.raises(TaskError, match=rf"task\.prompts.*row {COUNTED + 2}"):
        refuse_what_has_no_room(tmp_path / "l", tokenize, TokenBudget(50, 8))


@pytest.mark.trap("rewritten_history")
def test_one_prompt_of_each_shape_of_conversation_is_rendered(tmp_path: Path) -> None:
    """A template may refuse an order of roles or change thoughts; neither is seen in the longest prompts."""
    asks = {"role": "user", "content": "hi"}
    answers = {"role": "assistant", "content": "hello"}
    thinks = {"role": "assistant", "content": "<think>so</think>hello"}
    talks = [[asks], [asks, answers, asks], [asks, thinks, asks], [asks, answers, asks], [{**asks, "role": "system"}]]
    rows: list[dict[str, Any]] = [{"prompt": [{**asks, "content": "x" * 90}]}] * COUNTED
    write_longest(tmp_path / "l", {"p": Prompts([*rows, *({"prompt": talk} for talk in talks)], "p")})
    seen: list[Any] = []
    refuse_what_has_no_room(tmp_path / "l", lambda prompt, _: seen.append(prompt) or range(3), TokenBudget(50, 8))  # type: ignore[func-returns-value]
    assert seen[COUNTED:] == [talks[1], talks[2], talks[4]]


TEXTS = ["a" * 3, "b" * 9, "c" * 5, "d0123456789"]


def characters(prompt: Any, tools: Sequence[Any]) -> int:
    return len(tools) + (len(prompt) if isinstance(prompt, str) else sum(2 + len(each["content"]) for each in prompt))


def test_long_prompts_are_left_out_and_counted_and_rows_keep_their_names() -> None:
    found = fitting(texts(*TEXTS), characters, 5, shorten=False)
    assert [found.row(number).columns["n"] for number in range(len(found))] == [0, 2]
    assert found.where(1) == "p, row 3"
    assert found.notes == ("p: 2 of 4 prompts have more than 5 tokens; they are left out",)
    assert fitting(texts(*TEXTS), characters, 11, shorten=False).notes == ()


def test_the_end_of_a_shortened_prompt_is_kept() -> None:
    found = fitting(texts(*TEXTS), characters, 5, shorten=True)
    assert [found.row(number).prompt for number in range(4)] == ["aaa", "bbbbb", "ccccc", "56789"]
    assert found.row(3).columns["prompt"] == "d0123456789"
    assert found.notes == ("p: 2 of 4 prompts have more than 5 tokens; their beginning is cut off",)


def test_of_a_chat_the_longest_message_is_shortened() -> None:
    chat = [{"role": "system", "content": "Be"}, {"role": "user", "content": "0123456789"}]
    found = fitting(Prompts([{"prompt": chat}], "p"), characters, 11, shorten=True)
    assert found.row(0).prompt == [chat[0], {"role": "user", "content": "56789"}]


def test_tools_take_room_too() -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "tools": [{"name": "add"}]}]
    with golden.raises(TaskError, match="1 prompts.*4 tokens"):
        fitting(Prompts(rows, "p"), characters, 4, shorten=False)


def test_what_cannot_be_shortened_is_refused() -> None:
    chat = [{"role": "user", "content": "01"}] * 9
    with golden.raises(TaskError, match="row 1"):
        fitting(Prompts([{"prompt": chat}], "p"), characters, 11, shorten=True)


def test_each_source_of_a_mixture_keeps_its_weight() -> None:
    mixed = fitting(MixedPrompts((texts(*TEXTS), texts("e", "f")), (1.0, 2.0)), characters, 5, shorten=False)
    draw = Draw(mixed, 0, shuffle=False)
    assert sorted(str(draw(group).prompt)[0] for group in range(6)) == ["a", "c", "e", "e", "f", "f"]
    assert [note.partition(":")[0] for note in mixed.notes] == ["p"]


def test_a_rendered_text_that_would_lose_a_mark_is_refused() -> None:
    def mark(lost: str) -> str:
        return "<user>" if "<user>" in lost else ""

    for text in ("<user>0123456789", "abc<user>defghijk", "<user>ab<end><user>cdefgh"):
        with golden.raises(TaskError, match="row 1.*<user>"):
            fitting(texts(text), characters, 7, shorten=True, mark=mark)
    assert fitting(texts("0123456<user>"), characters, 8, shorten=True, mark=mark).row(0).prompt == "56<user>"
