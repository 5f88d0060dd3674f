"""Rows without tests are found before a run starts, where programs are tested."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.errors import TaskError
from asyncrl.tasks import load_prompts
from asyncrl.tasks.prompt_rows import MOST_CHECKED
from asyncrl.tasks.source_problems import check_rows, prompt_problems
from tests import golden

GOOD = {"prompt": "p", "tests": ["assert f(1) == 1"]}
PASSES = '[reward]\nfunctions = [{ use = "passes_tests" }]\n'
REPAIR = '[environment]\nuse = "repair"\noptions = { column = "checks" }\n'


def problems(folder: Path, rows: list[dict[str, Any]], more: str) -> list[str]:
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "e.toml").write_text(f'[model]\nname = "warmed:repair"\n[task]\nprompts = "{folder}/p.jsonl"\n{more}')
    return [str(problem) for problem in prompt_problems(load(str(folder / "e.toml")).config)]


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        ([GOOD, {"prompt": "q"}], PASSES, "line 2"),
        ([{**GOOD, "tests": []}], PASSES, "line 1"),
        ([GOOD], REPAIR, "line 1"),
    ],
)
def test_a_row_without_tests_is_named(tmp_path: Path, rows: list[dict[str, Any]], more: str, said: str) -> None:
    (problem,) = problems(tmp_path, rows, more)
    assert "task.prompts: " in problem
    golden.says(problem, said)


def test_only_programs_need_tests(tmp_path: Path) -> None:
    assert problems(tmp_path, [GOOD], PASSES) == []
    assert problems(tmp_path, [{"prompt": "q", "answer": "a"}], '[reward]\nfunctions = ["exact_match"]\n') == []


def rows(bad: Any, number: int = 1700, count: int = 2000, column: str = "answer") -> list[dict[str, Any]]:
    made = [{"prompt": f"say {each}", column: str(each)} for each in range(count)]
    made[number] = {"prompt": "say", **({} if bad is MISSING else {column: bad})}
    return made


MISSING = object()
ANSWERS = {use: f'[reward]\nfunctions = ["{use}"]\n' for use in ("numeric", "exact_match", "math_verify")}
JUDGE = (
    '[reward]\nfunctions = [{ use = "judge", options = { url = "http://h/v1", model = "m", rubric = "{answer}?" } }]\n'
)


@pytest.mark.parametrize(
    ("use", "bad"),
    [
        *(("numeric", bad) for bad in ("x+1", "3 or 4", "", None, MISSING, [1, 2])),
        *(("exact_match", bad) for bad in (None, ["a"], {"a": 1}, MISSING)),
        *(("math_verify", bad) for bad in ("", "so #### ", "\\boxed{}", "$$", None, MISSING)),
    ],
)
def test_every_row_is_checked_for_what_a_template_reads(tmp_path: Path, use: str, bad: Any) -> None:
    (problem,) = problems(tmp_path, rows(bad), ANSWERS[use])
    assert "p.jsonl, line 1701: " in problem
    golden.says(problem, f"line 1701: {use}", "column answer")
    assert problems(tmp_path, rows("7"), ANSWERS[use]) == []


def test_a_rubric_names_columns_of_every_row(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, rows(MISSING), JUDGE.replace("{answer}", "{answer} {solution}"))
    golden.says(problem, "line 1", "column solution")
    assert problems(tmp_path, rows(MISSING), JUDGE) == []  # {answer} is that of the policy


def test_every_row_of_tests_is_checked(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, [GOOD] * 1999 + [{**GOOD, "tests": [3]}], PASSES)
    golden.says(problem, "line 2000", "tests[0]")


def test_parquet_is_checked_to_its_end(tmp_path: Path) -> None:
    table = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    config = config_with("numeric")
    for bad, said in (({"answer": "x+1"}, "numeric needs the column answer: "), ({"prompt": ""}, "a prompt is text")):
        made = rows("7")
        made[1900] |= bad
        parquet.write_table(table.Table.from_pylist(made), tmp_path / "p.parquet")
        with pytest.raises(TaskError, match=rf"^task\.prompts: .*p\.parquet, row 1901: {said}"):
            check_rows(config, {"task.prompts": load_prompts(str(tmp_path / "p.parquet"))})


def config_with(*functions: str) -> Config:
    sections = {"model": {"name": "m"}, "task": {"prompts": "p"}, "reward": {"functions": functions}}
    return Config.model_validate(sections)


class OnDemand:
    """Rows that are made when they are asked for, as those of a data set of the hub."""

    def __init__(self, bad: int, count: int = 10**7) -> None:
        self.bad = bad
        self.count = count
        self.asked = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, str]:
        self.asked += 1
        return {"prompt": "say", "answer": "x+1" if number == self.bad else "7"}


def test_the_first_rows_of_those_that_are_made_on_demand_are_checked_and_that_is_said() -> None:
    config = config_with("numeric")
    made = load_prompts(OnDemand(MOST_CHECKED))
    assert made.notes == (
        "the rows given as prompts makes its 10,000,000 rows on demand: the first 10,000 are checked before the run",
    )
    check_rows(config, {"task.prompts": made})
    with golden.raises(TaskError, match="row 10000.*column answer"):
        check_rows(config, {"task.prompts": load_prompts(OnDemand(MOST_CHECKED - 1))})
    assert load_prompts(rows("7")).notes == ()


def test_a_held_out_set_is_checked_by_its_own_functions(tmp_path: Path) -> None:
    own = f'[evaluate.sets.own]\nprompts = "{tmp_path}/own.jsonl"\nfunctions = ["exact_match"]\n'
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": "a", "answer": "x+1"}) + "\n")
    assert problems(tmp_path, rows("7"), ANSWERS["numeric"] + own) == []
    (problem,) = problems(tmp_path, rows("7"), ANSWERS["numeric"] + own.replace("exact_match", "numeric"))
    assert "evaluate.sets.own.prompts: " in problem
    golden.says(problem, "own.jsonl, line 1", "column answer")


@pytest.mark.parametrize("more", ['[reward]\nfunctions = ["mine.py:f"]\n', '[reward]\nfunctions = ["length"]\n', ""])
def test_functions_of_the_user_and_templates_without_columns_ask_nothing_of_rows(tmp_path: Path, more: str) -> None:
    assert problems(tmp_path, rows(None), more) == []


def test_each_row_is_made_once_for_all_checks() -> None:
    config = config_with("numeric", "exact_match")
    for count in (100, 1000):
        made = OnDemand(-1, count)
        prompts = load_prompts(made)
        assert made.asked == 1, "rows that are made on demand are looked at when they are drawn"
        made.asked = 0
        check_rows(config, {"task.prompts": prompts})
        assert made.asked == count
