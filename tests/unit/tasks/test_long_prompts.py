"""Prompts with more tokens than there is room for, left out or shortened, and counted; a token is a character."""

from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks import Draw, Prompts
from asyncrl.tasks.prompt_lengths import fitting
from asyncrl.tasks.prompt_rows import MixedPrompts
from tests import golden

TEXTS = ["a" * 3, "b" * 9, "c" * 5, "d0123456789"]


def count(prompt: Any, tools: Sequence[Any]) -> int:
    return len(tools) + (len(prompt) if isinstance(prompt, str) else sum(2 + len(each["content"]) for each in prompt))


def prompts(*texts: str) -> Prompts:
    return Prompts([{"prompt": text, "n": number} for number, text in enumerate(texts)], "p")


def test_long_prompts_are_left_out_and_counted_and_rows_keep_their_names() -> None:
    found = fitting(prompts(*TEXTS), count, 5, shorten=False)
    assert [found.row(number).columns["n"] for number in range(len(found))] == [0, 2]
    assert found.where(1) == "p, row 3"
    assert found.notes == ("p: 2 of 4 prompts have more than 5 tokens; they are left out",)
    assert fitting(prompts(*TEXTS), count, 11, shorten=False).notes == ()


def test_the_end_of_a_shortened_prompt_is_kept() -> None:
    found = fitting(prompts(*TEXTS), count, 5, shorten=True)
    assert [found.row(number).prompt for number in range(4)] == ["aaa", "bbbbb", "ccccc", "56789"]
    assert found.row(3).columns["prompt"] == "d0123456789"
    assert found.notes == ("p: 2 of 4 prompts have more than 5 tokens; their beginning is cut off",)


def test_of_a_chat_the_longest_message_is_shortened() -> None:
    chat = [{"role": "system", "content": "Be"}, {"role": "user", "content": "0123456789"}]
    found = fitting(Prompts([{"prompt": chat}], "p"), count, 11, shorten=True)
    assert found.row(0).prompt == [chat[0], {"role": "user", "content": "56789"}]


def test_tools_take_room_too() -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "tools": [{"name": "add"}]}]
    with golden.raises(TaskError, match="1 prompts.*4 tokens"):
        fitting(Prompts(rows, "p"), count, 4, shorten=False)


def test_what_cannot_be_shortened_is_refused() -> None:
    chat = [{"role": "user", "content": "01"}] * 9
    with golden.raises(TaskError, match="row 1"):
        fitting(Prompts([{"prompt": chat}], "p"), count, 11, shorten=True)


def test_each_source_of_a_mixture_keeps_its_weight() -> None:
    mixed = fitting(MixedPrompts((prompts(*TEXTS), prompts("e", "f")), (1.0, 2.0)), count, 5, shorten=False)
    draw = Draw(mixed, 0, shuffle=False)
    assert sorted(str(draw(group).prompt)[0] for group in range(6)) == ["a", "c", "e", "e", "f", "f"]
    assert [note.partition(":")[0] for note in mixed.notes] == ["p"]


@pytest.mark.parametrize("text", ["<user>0123456789", "abc<user>defghijk", "<user>ab<end><user>cdefgh"])
def test_a_rendered_text_that_would_lose_a_mark_is_refused(text: str) -> None:
    def mark(lost: str) -> str:
        return "<user>" if "<user>" in lost else ""

    with golden.raises(TaskError, match="row 1.*<user>"):
        fitting(prompts(text), count, 7, shorten=True, mark=mark)
    assert fitting(prompts("0123456<user>"), count, 8, shorten=True, mark=mark).row(0).prompt == "56<user>"
