"""Completions with no, one, several, unfinished and opened thoughts."""

import pytest

from asyncrl.protocols.thoughts import ends_in_thoughts, split_thoughts


@pytest.mark.parametrize(
    ("text", "opened", "answer"),
    [
        ("plain", False, "plain"),
        ("", False, ""),
        ("<think>a</think>b", False, "b"),
        ("  Well. <think>a</think>b", False, "b"),
        ("<think>so 5", False, ""),
        ("so 5", True, ""),
        ("so 5</think> 6", True, " 6"),
        ("so 5</think> 6", False, " 6"),
        ("<think>a</think>b<think>c</think>d", False, "d"),
        ("<think>a</think>b<think>c", False, ""),
        ("<think>the mark <think> is odd</think>b", False, "b"),
        ("<think>a</think>draft</think>b", False, "b"),
        ("[THINK]a </think> b[/THINK]c", False, "c"),
        ("<|channel|>analysis<|message|>5?<|end|><|start|>assistant<|channel|>final<|message|>6", False, "6"),
        ("<|channel|>analysis<|message|>5?", False, ""),
        ("<think></think>b", True, "b"),
        ("a < b and b > c", False, "a < b and b > c"),
    ],
)
def test_the_answer_stands_behind_the_thoughts(text: str, opened: bool, answer: str) -> None:
    thoughts, found = split_thoughts(text, opened)
    assert found == answer
    assert thoughts + found == text


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("[THINK]", True),
    ],
)
def test_a_prompt_may_end_inside_thoughts(prompt: str, inside: bool) -> None:
    assert ends_in_thoughts(prompt) is inside
