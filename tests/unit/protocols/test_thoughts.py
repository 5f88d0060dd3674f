"""Completions with no, one, several, unfinished and opened thoughts."""

import pytest

from asyncrl.protocols.answer_text import ends_in_thoughts, split_thoughts


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
        ("◁think▷so 5◁/think▷6", False, "6"),
        ("<|START_THINKING|>so 5<|END_THINKING|>6", False, "6"),
        ("<|channel>thought\nso 5<channel|>6", False, "6"),
        ("<reasoning>so 5</reasoning><answer>6</answer>", False, "<answer>6</answer>"),
        ('find("<think>") or ["a <think> b"]', False, 'find("<think>") or ["a <think> b"]'),
        ('{"find": "</think>"} 5', False, '{"find": "</think>"} 5'),
        ('<think>with("</think>") so</think>b', False, "b"),
        ('a "<think> b" c', False, ""),
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


@pytest.mark.parametrize(
    ("begun", "inside"),
    [("<think>\nLet me", True), ("<think>so</think>\nIt is", False), ("It is", False), ("<think>", True)],
)
def test_an_answer_that_goes_on_may_stand_inside_thoughts(begun: str, inside: bool) -> None:
    assert ends_in_thoughts(f"user: Do you <think>?\nassistant: {begun}", begun) is inside
