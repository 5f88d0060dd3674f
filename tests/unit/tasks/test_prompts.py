from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks import Prompts


def test_rows_keep_all_columns() -> None:
    prompts = Prompts([{"prompt": "2+2=", "answer": "4", "tags": ("a", "b"), "score": np.float32(0.5)}], "rows")
    row = prompts.row(0)
    assert row.prompt == "2+2="
    assert row.columns == {"prompt": "2+2=", "answer": "4", "tags": ["a", "b"], "score": 0.5}
    assert type(row.columns["score"]) is float


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "2+2=", "answer": "4"}, 'found are question, answer; the closest is "question": rename it'),
        ({"promt": "2+2="}, 'the closest is "promt"'),
        ({"a": 1}, "found are a, or write a function"),
        ({}, "found are no columns"),
        ({"prompt": ""}, "text that is not empty"),
        ({"prompt": " \n"}, "text that is not empty"),
        ({"prompt": []}, "text that is not empty"),
        ({"prompt": [{"role": "user", "content": " "}, {"role": "user", "content": ""}]}, "not all empty"),
        ({"prompt": [{"content": "no role"}]}, "this is .*no role"),
        ({"prompt": "x", "where": Path("/")}, "row 0, column where: a value of type PosixPath cannot be sent"),
        ("text", "this is str"),
    ],
)
def test_bad_rows_say_what_is_wrong(row: object, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        Prompts([row], "rows")  # type: ignore[list-item]


def test_a_bad_row_in_the_middle_is_found_at_once() -> None:
    with pytest.raises(TaskError, match="rows, row 2: "):
        Prompts([{"prompt": "a"}, {"prompt": "b"}, {"prompt": None}], "rows")


def test_no_rows_are_an_error() -> None:
    with pytest.raises(TaskError, match="rows: there are no rows"):
        Prompts([], "rows")


def test_a_system_message_goes_before_text_and_messages() -> None:
    question = {"role": "user", "content": "hi"}
    prompts = Prompts([{"prompt": "hi"}, {"prompt": [question]}], "rows", system="Be brief.")
    expected = [{"role": "system", "content": "Be brief."}, question]
    assert prompts.row(0).prompt == prompts.row(1).prompt == expected
    assert prompts.row(0).columns["prompt"] == "hi"


def test_two_system_messages_are_refused() -> None:
    with pytest.raises(TaskError, match=r"remove task\.system"):
        Prompts([{"prompt": [{"role": "system", "content": "a"}]}], "rows", system="b")


def test_first_rows() -> None:
    prompts = Prompts([{"prompt": str(number)} for number in range(3)], "rows")
    assert [prompt for prompt, _ in prompts.first(2)] == ["0", "1"]
    assert len(prompts.first(9)) == 3
