from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import TaskError
from asyncrl.tasks import Draw, Prompts, drawn_row
from tests import golden


def test_rows_keep_all_columns() -> None:
    prompts = Prompts([{"prompt": "2+2=", "answer": "4", "tags": ("a", "b"), "score": np.float32(0.5)}], "rows")
    row = prompts.row(0)
    assert row.prompt == "2+2="
    assert row.columns == {"prompt": "2+2=", "answer": "4", "tags": ["a", "b"], "score": 0.5}
    assert type(row.columns["score"]) is float


@pytest.mark.parametrize(
    "row",
    [
        {"question": "2+2=", "answer": "4"},
        {"promt": "2+2="},
        {"a": 1},
        {},
        {"prompt": ""},
        {"prompt": " \n"},
        {"prompt": []},
        {"prompt": [{"role": "user", "content": " "}, {"role": "user", "content": ""}]},
        {"prompt": [{"content": "no role"}]},
        {"prompt": "x", "where": Path("/")},
        "text",
    ],
)
def test_bad_rows_say_what_is_wrong(row: object) -> None:
    with golden.raises(TaskError):
        Prompts([row], "rows")  # type: ignore[list-item]


def test_a_system_message_goes_before_text_and_messages() -> None:
    question = {"role": "user", "content": "hi"}
    prompts = Prompts([{"prompt": "hi"}, {"prompt": [question]}], "rows", system="Be brief.")
    expected = [{"role": "system", "content": "Be brief."}, question]
    assert prompts.row(0).prompt == prompts.row(1).prompt == expected
    assert prompts.row(0).columns["prompt"] == "hi"


def test_first_rows() -> None:
    prompts = Prompts([{"prompt": str(number)} for number in range(3)], "rows")
    assert [prompt for prompt, _ in prompts.first(2)] == ["0", "1"]
    assert len(prompts.first(9)) == 3


@given(st.integers(0, 2**63), st.integers(1, 300), st.integers(0, 5))
def test_an_epoch_draws_every_row_once(seed: int, rows: int, epoch: int) -> None:
    drawn = [drawn_row(seed, epoch * rows + place, rows) for place in range(rows)]
    assert sorted(drawn) == list(range(rows))


def test_seed_and_epoch_change_the_order() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [drawn_row(seed, epoch * 100 + place, 100) for place in range(100)]

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(one) for one in orders}) == 9
    assert order(0, 0) != list(range(100))


def test_the_order_is_the_same_on_every_machine() -> None:
    assert [drawn_row(0, group, 10) for group in range(10)] == [9, 8, 6, 5, 0, 1, 3, 2, 7, 4]


def test_every_place_of_the_order_is_equally_likely() -> None:
    counts = [0] * 8
    for seed in range(4000):
        counts[drawn_row(seed, 0, 8)] += 1
    assert all(400 < count < 600 for count in counts), counts


def test_a_group_gets_prompt_and_columns_of_its_row() -> None:
    rows = [{"prompt": f"p{number}", "answer": number} for number in range(7)]
    draw = Draw(Prompts(rows, "rows"), seed=3)
    prompt, columns = draw(9)
    assert prompt == f"p{drawn_row(3, 9, 7)}"
    assert columns == {"prompt": prompt, "answer": drawn_row(3, 9, 7)}
