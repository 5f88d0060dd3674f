"""`asyncrl try` says in words whether a group would teach."""

import pytest

from asyncrl.deploy.commands.tried_rows import _answer, group_in_words
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.messages import SampleText, Score


@pytest.mark.parametrize(
    ("texts", "rewards", "finish", "says"),
    [
        ("ab", (0.0, 1.0), "stop", ["group of 2 samples: 2 different texts, rewards 0 to 1 (mean 0.5)"]),
        ("ab", (1.0, 1.0), "stop", ["2 different texts, rewards 1 to 1 (mean 1)", "all equal: under a group"]),
        ("aa", (1.0, 1.0), "stop", ["1 different text", "all identical: raise generation.temperature", "all equal"]),
        ("ab", (0.0, 1.0), "length", ["2 different texts", "all cut off: raise generation.max_new_tokens"]),
        ("ab", (None, None), "stop", ["2 different texts, no rewards"]),
        ("a", (0.5,), "stop", ["group of 1 samples: 1 different text"]),
    ],
)
def test_what_keeps_a_group_from_teaching_is_named(
    texts: str, rewards: tuple[float | None, ...], finish: str, says: list[str]
) -> None:
    rows = BatchRef(tuple(RowRef(0, member, 0, 0, 5, 3, 0, 0, finish, ()) for member in range(len(texts))))
    shown = [SampleText(0, member, "p", text) for member, text in enumerate(texts)]
    lines = group_in_words(rows, shown, [Score(reward, {}) for reward in rewards]).splitlines()
    assert len(lines) == len(says)
    assert all(part in line for part, line in zip(says, lines, strict=True))


@pytest.mark.parametrize(
    ("prompt", "text", "says"),
    [
        ("assistant\n<think>\n", "so it is 4", True),
        ("assistant\n", "<think>so it is 4", True),
        ("assistant\n<think>\n", "so\n</think>\n4", False),
        ("assistant\n", "4", False),
        ("assistant\n", " ", False),
    ],
)
def test_an_answer_that_stays_in_its_thoughts_is_said_to_be_none(prompt: str, text: str, says: bool) -> None:
    shown = list(_answer(SampleText(0, 0, prompt, text), "9 tokens, ended by length"))
    assert [any("its thoughts do not end, so that rewards read no answer" in line for line in shown)] == [says]
