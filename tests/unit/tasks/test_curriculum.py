"""Sources whose weights a function of the user changes from step to step."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.named_files import source_files
from asyncrl.config.sources import load
from asyncrl.errors import TaskError
from asyncrl.tasks import Prompts
from asyncrl.tasks.prompt_rows import MixedPrompts
from asyncrl.tasks.prompt_sources import CurriculumDraw


def draw(weights: Callable[[int], Any], per_step: int = 4, shuffle: bool = True) -> CurriculumDraw:
    sources = (("e", 3), ("h", 5))
    parts = [Prompts([{"prompt": f"{name}{n}"} for n in range(rows)], name) for name, rows in sources]
    return CurriculumDraw(MixedPrompts(tuple(parts)), 7, shuffle, weights, per_step)


def from_easy_to_hard(step: int) -> list[float]:
    return [max(0.0, 4.0 - step), float(step)]


def test_each_step_has_the_shares_of_its_weights() -> None:
    made = draw(from_easy_to_hard)
    for step in range(7):
        drawn = Counter(str(made(4 * step + place).prompt)[0] for place in range(4))
        assert (drawn["e"], drawn["h"]) == (max(0, 4 - step), min(4, step))


def test_each_source_goes_through_its_rows_epoch_by_epoch() -> None:
    made = draw(from_easy_to_hard)
    drawn = [str(made(group).prompt) for group in range(40)]
    for name, rows in (("e", 3), ("h", 5)):
        own = [prompt for prompt in drawn if prompt[0] == name]
        for first in range(0, len(own) - rows + 1, rows):
            assert len(set(own[first : first + rows])) == rows


def test_a_group_has_its_row_whenever_it_is_asked_for() -> None:
    made = draw(from_easy_to_hard)
    expected = [made.where(group) for group in range(40)]
    assert [draw(from_easy_to_hard).where(group) for group in reversed(range(40))] == expected[::-1]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (lambda step: [1], r"it returned \[1\] for step 0; return a weight of 0 or more for each of the 2 sources"),
        (lambda step: [1, -1], "return a weight"),
        (lambda step: [0, 0], "not all 0"),
        (lambda step: [1, float("nan")], "return a weight"),
        (lambda step: [1, 1, "x"], "return a weight"),
        (lambda step: "ab", "return a weight"),
        (lambda step: 1 / step, r"for step 0 it raised ZeroDivisionError: .*test_curriculum\.py, line \d+\)"),
    ],
)
def test_what_are_no_weights_is_refused(weights: Callable[[int], Any], said: str) -> None:
    with pytest.raises(TaskError, match=rf"^task\.curriculum: .*{said}"):
        draw(weights)(0)


def test_the_function_is_code_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def weights(step):\n    return [1, step]\n")
    (tmp_path / "e.toml").write_text(
        'model.name = "m"\n[task]\nprompts = ["a.jsonl", "b.jsonl"]\ncurriculum = "mine.py:weights"\n'
    )
    config = load(tmp_path / "e.toml", (), {}).config
    assert config.task.curriculum == f"{tmp_path}/mine.py:weights"
    assert ("task.curriculum", tmp_path / "mine.py") in list(source_files(config))
