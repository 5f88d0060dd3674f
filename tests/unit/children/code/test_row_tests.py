"""The tests of a row, in the forms of the usual data sets: each fails a wrong program, and passes a right one."""

import asyncio
import json
from typing import Any

import pytest

from asyncrl.children.code.code_runner import CodeRunner
from asyncrl.children.code.row_tests import cases_in
from asyncrl.children.sandbox import Program, TestCase
from asyncrl.errors import TaskError
from tests import golden

WRONG = "def double(x):\n    return 0\n"
RIGHT = "def double(x):\n    return 2 * x\n"
READS = "print(1)"
PRINTS = "for _ in range(1):\n    print(2 * int(input()))\n"
CHECK = "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2) == 4\n"
UNIT = (
    "import unittest\n\n\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(double(2), 4)\n"
)
PAIRS = {"inputs": ["1\n", "3\n"], "outputs": ["2\n", "6\n"]}
NAMED = {"inputs": [[2], [3]], "outputs": [[4], 6], "fn_name": "double"}
LINES = [{"input": "2\n", "output": "4", "testtype": "functional"}]
OF_METHOD = "class Solution:\n    def double(self, x):\n        return {} * x\n"
TREE = "class Node:\n    def __init__(self, value):\n        self.value, self.left = value, None\n"


def of_functions(tests: Any, **row: Any) -> tuple[str, str, dict[str, Any]]:
    return WRONG, RIGHT, {"tests": tests, **row}


def of_texts(tests: Any, **row: Any) -> tuple[str, str, dict[str, Any]]:
    return READS, PRINTS, {"tests": tests, **row}


FORMS = {
    "asserts": of_functions(["assert double(2) == 4"]),
    "HumanEval": of_functions(CHECK, entry_point="double"),
    "HumanEval, called": of_functions(f"{CHECK}\ncheck(double)\n"),
    "a method of LeetCode": (
        OF_METHOD.format(0),
        OF_METHOD.format(2),
        {"tests": CHECK, "entry_point": "Solution().double"},
    ),
    "candidate": of_functions(["assert candidate(2) == 4"], entry_point="double"),
    "unittest": of_functions(UNIT),
    "unittest of a base": of_functions(UNIT.replace("class T(", "class B(unittest.TestCase): pass\nclass T(B, ", 1)),
    "unittest.main": of_functions(f"{UNIT}\nif __name__ == '__main__':\n    unittest.main()\n"),
    "a bare unittest.main": of_functions(f"{UNIT}\nunittest.main()\n"),
    "IsolatedAsyncioTestCase": of_functions(
        UNIT.replace("TestCase", "IsolatedAsyncioTestCase").replace("def test", "async def test")
    ),
    "functions of pytest": of_functions("def test_a():\n    assert double(2) == 4\n"),
    "pytest.main": of_functions("import pytest\ndef test_a():\n    assert double(2) == 4\npytest.main(['-q'])\n"),
    "coroutines of pytest": of_functions("async def test_a():\n    assert double(2) == 4\n"),
    "classes of pytest": of_functions(
        "class TestA:\n    def setup_method(self):\n        self.two = 2\n"
        "    def test_a(self):\n        assert double(self.two) == 4\n"
    ),
    "imported": of_functions("from solution import double\n\ndef test_a():\n    assert double(2) == 4\n"),
    "imported under a name": of_functions("from .main import double as twice, halve\nassert twice(2) == 4"),
    "a module": of_functions(f"import math, solution as s\n{UNIT.replace('double', 's.double')}"),
    "imported in the test": of_functions("def test_a():\n    from submission import *\n    assert double(2) == 4"),
    "the module of the function": of_functions("from twice import double\nassert double(2) == 4", entry_point="double"),
    "the module of a package": of_functions("from app import solution\nassert solution.double(2) == 4"),
    "a package that it can do without": of_functions(
        "try:\n    import numpy\nexcept ImportError:\n    numpy = None\nassert double(2) == 4"
    ),
    "run as a script": of_functions("if __name__ == '__main__':\n    assert double(2) == 4\n"),
    "a comparison": of_functions(["double(2) == 4"]),
    "JSON text of asserts": of_functions(json.dumps(["assert double(2) == 4"])),
    "Python's text of asserts": of_functions(str(["assert double(2) == 4"])),
    "MBPP": of_functions(["assert isclose(double(2), 4)"], test_setup_code="from math import isclose", test_imports=[]),
    "APPS": of_texts(json.dumps(PAIRS)),
    "APPS, lines": of_texts({"inputs": [["1", ""]], "outputs": [["2"]]}),
    "APPS, a function": of_functions(json.dumps(NAMED)),
    "TACO": of_texts({**PAIRS, "fn_name": None}),
    "CodeContests": of_texts({"input": ["1\n"], "output": ["2\n"]}),
    "LiveCodeBench": of_texts(json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}])),
    "LiveCodeBench, a function": of_functions(json.dumps(LINES), metadata=json.dumps({"func_name": "double"})),
    "DeepCoder": of_functions([{**LINES[0], "metadata": {"func_name": "double"}}]),
    "test_cases": of_texts(
        {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "1", "output": "2"}]}
    ),
    "a call": of_functions([{"type": "function_call", "fn_name": "double", "input": [2], "output": 4}]),
    "tuples and floats": (
        "def f(x): return (x, 0.0)",
        "def f(x): return (x, 0.1 + 0.2)",
        {"tests": {"inputs": [[1]], "outputs": [[1, 0.3]], "fn_name": "f"}},
    ),
    "a tree of the program": (
        TREE,
        f"{TREE}def total(node): return node.value + (total(node.left) if node.left else 0)",
        {"tests": ["assert total(root) == 3"], "test_setup_code": "root = Node(1)\nroot.left = Node(2)"},
    ),
}


@pytest.fixture(scope="module")
def outcomes(bubblewrap_works: None) -> dict[str, list[tuple[bool, bool]]]:
    """Returns for each form, and each of its tests, whether the wrong and the right program pass."""

    async def run() -> dict[str, list[tuple[bool, bool]]]:
        runner = CodeRunner()
        found = {}
        for name, (wrong, right, row) in FORMS.items():
            cases = cases_in(row, "tests")
            both = [await runner.run(Program(source, cases), 20) for source in (wrong, right)]
            assert [len(results) for results in both] == [len(cases)] * 2
            found[name] = [(bad.passed, good.passed) for bad, good in zip(*both, strict=True)]
        await runner.close()
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_program_fails_and_a_right_one_passes(form: str, outcomes: dict[str, list[tuple[bool, bool]]]) -> None:
    assert outcomes[form]
    assert set(outcomes[form]) == {(False, True)}


def test_tests_are_texts_or_tables() -> None:
    asserts = TestCase("tests[0]", code="assert f(1) == 1")
    assert cases_in({"tests": "assert f(1) == 1"}, "tests") == (asserts,)
    assert cases_in({"tests": ["assert f(1) == 1"]}, "tests") == (asserts,)
    table = {"stdin": "1", "stdout": "2"}
    assert cases_in({"io": [table, {"name": "b", "code": "assert f(1)"}]}, "io") == (
        TestCase("io[0]", stdin="1", stdout="2"),
        TestCase("b", code="assert f(1)"),
    )
    assert cases_in({"io": PAIRS}, "io")[1] == TestCase("io[0][1]", stdin="3\n", stdout="6\n")


@pytest.mark.parametrize("tests", golden.cases(__file__, "test_what_is_no_test"), ids=str)
def test_what_is_no_test(tests: str) -> None:
    with golden.raises(TaskError):
        cases_in({"tests": json.loads(tests)}, "tests")


@pytest.mark.parametrize("tests", ["eJxrYJmqwMAABMYzAA==", "double(2) ="])
def test_a_text_that_python_cannot_read_is_no_test(tests: str) -> None:
    with pytest.raises(TaskError, match="is no Python"):
        cases_in({"tests": tests}, "tests")


def test_a_row_without_tests_names_its_columns() -> None:
    with pytest.raises(TaskError, match="the row has no column tests with tests; found are prompt, answer"):
        cases_in({"prompt": "p", "answer": "a"}, "tests")


HELPED = """import math
SCALE = 2

def helper(x):
    return math.floor(x) * SCALE

def unused(x): return x

def f(x):
    \"\"\"Give the helper of x.\"\"\"
"""


@pytest.mark.parametrize("row", [{}, {"entry_point": "f"}])
def test_helpers_of_a_beginning_are_those_of_the_row(row: dict[str, str]) -> None:
    (case,) = cases_in({**row, "before": HELPED, "tests": ["assert helper(f(2)) == 8"]}, "tests")
    names: dict[str, object] = {"f": lambda x: 4}
    exec(case.code, names)
    assert {"helper", "unused", "SCALE"} <= set(names)
    assert "def f" not in case.code


@pytest.mark.parametrize(
    "before", ["def f(x):\n", "def f(x):\n    pass\n", "x = 1\n", "{", "", None, 5, "class A: pass\n"]
)
def test_a_beginning_without_helpers_adds_nothing(before: object) -> None:
    (case,) = cases_in({"before": before, "tests": ["assert f(2) == 4"]}, "tests")
    assert case.code == "assert f(2) == 4"


def test_a_test_that_only_calls_a_helper_asserts_nothing() -> None:
    with pytest.raises(TaskError):
        cases_in({"before": HELPED, "tests": ["assert helper(2) == 4"]}, "tests")


@pytest.mark.parametrize(
    ("test", "objects"),
    [
        ("# objects = true\nassert f().x == 1", True),
        ("assert f().x == 1\n  #objects=true", True),
        ({"code": "assert f().x == 1", "objects": True}, True),
        ({"code": "assert f().x == 1", "objects": False}, False),
        ({"code": "assert f().x == 1", "objects": "true"}, False),
        ("assert f() == '# objects = true'", False),
        ("# no objects = true\nassert f() == 1", False),
    ],
)
def test_a_test_says_whether_it_works_with_objects(test: object, objects: bool) -> None:
    (case,) = cases_in({"tests": [test]}, "tests")
    assert case.objects is objects
