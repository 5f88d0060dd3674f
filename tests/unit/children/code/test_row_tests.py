"""The tests of a row, in the forms of the usual data sets: each fails a wrong program, and passes a right one."""

import json
from typing import Any

import pytest

from asyncrl.children.code.code_runner import CodeRunner
from asyncrl.children.code.row_tests import cases_in
from asyncrl.children.sandbox import Program
from asyncrl.errors import TaskError

FUNCTIONS = ("def double(x):\n    return 0\n", "def double(x):\n    return 2 * x\n")
SCRIPTS = ("print(1)", "print(2 * int(input()))")
CHECK = "def check(candidate):\n    assert candidate(2) == 4\n"
UNIT = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(double(2), 4)\n"
OF_FUNCTIONS: list[dict[str, Any]] = [
    *({"tests": CHECK, "entry_point": "double"}, {"tests": f"{CHECK}check(double)"}, {"tests": ["double(2) == 4"]}),
    *(
        {"tests": UNIT},
        {"tests": f"{UNIT}unittest.main()"},
        {"tests": f"if __name__:\n {UNIT.splitlines()[0]}\n{UNIT}"},
    ),
    *({"tests": UNIT.replace("Case", "Case", 1)}, {"tests": "async def test_a():\n    assert double(2) == 4"}),
    {
        "tests": "class TestA:\n    def setup_method(self):\n        self.x = 2\n    def test_a(self):\n"
        "        assert double(self.x) == 4"
    },
    *({"tests": json.dumps(["assert double(2) == 4"])}, {"tests": str(["assert double(2) == 4"])}),
    {"tests": ["assert isclose(double(2), 4)"], "test_setup_code": "from math import isclose", "test_imports": []},
    {"tests": "if __name__ == '__main__':\n    assert double(2) == 4"},
]
OF_SCRIPTS: list[Any] = [
    *(json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]}), {"inputs": [["1"]], "outputs": [["2"]], "fn_name": None}),
    *({"input": ["1\n"], "output": ["2\n"]}, json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])),
]
MEANT = [(FUNCTIONS, row) for row in OF_FUNCTIONS] + [(SCRIPTS, {"tests": tests}) for tests in OF_SCRIPTS]


@pytest.mark.parametrize(("programs", "row"), MEANT)
async def test_a_wrong_program_fails_and_a_right_one_passes(
    bubblewrap_works: None, programs: tuple[str, str], row: dict[str, Any]
) -> None:
    runner, cases = CodeRunner(), cases_in(row, "tests")
    results = [await runner.run(Program(source, cases), 20) for source in programs]
    await runner.close()
    assert [[result.passed for result in each] for each in results] == [[False] * len(cases), [True] * len(cases)]


@pytest.mark.parametrize(
    "tests",
    [
        *([], None, 7, [""], ["assert f(1)", 3], [{"stdin": "1"}], [{"stdout": "1", "checker": "2"}], CHECK, "f(2) ="),
        *("double(2)", "x = double(2)", "assert True", "assert (double(2) == 4, 'two')", "assert max(1, 2) == 2"),
        *({"inputs": ["1"], "outputs": ["2", "3"]}, "def helper():\n    assert double(2) == 4", "import math"),
        *(
            {"inputs": [[1]], "outputs": [2], "fn_name": "double"},
            [{"input": "1", "output": "2", "testtype": "functional"}],
        ),
    ],
)
def test_what_is_no_test_is_refused(tests: Any) -> None:
    with pytest.raises(TaskError, match=r"the row's tests.* (is no|are no|has 1|asserts nothing)"):
        cases_in({"tests": tests}, "tests")
    with pytest.raises(TaskError, match="the row has no column tests with tests; found are tested"):
        cases_in({"tested": tests}, "tests")
