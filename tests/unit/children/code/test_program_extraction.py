"""The code in an answer, and the tests of a row."""

from typing import Any

import pytest

from asyncrl.children.code.program_extraction import cases_in, code_in
from asyncrl.children.sandbox import TestCase
from asyncrl.errors import TaskError

CODE = "def f(x):\n    return x\n"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (CODE, CODE),
        (f"Sure:\n```python\n{CODE}```\nor\n```\nother\n```", CODE),
        (f"```\n{CODE}", CODE),
        (f"  ```py\n{CODE}  ```", CODE),
        ("x = 'a ``` b'", "x = 'a ``` b'"),
        ("", ""),
    ],
)
def test_code_is_the_first_fenced_block_or_everything(answer: str, code: str) -> None:
    assert code_in(answer, {}) == code


def test_what_the_row_has_before_the_code_comes_first() -> None:
    row = {"before": 'def f(x):\n    """Return x."""\n'}
    assert code_in("    return x", row) == 'def f(x):\n    """Return x."""\n    return x'
    assert code_in(f"```\n{CODE}```", row) == f"{row['before']}\n{CODE}"
    assert code_in("x", {"before": None}) == "x"


def test_tests_are_texts_or_tables() -> None:
    asserts = TestCase("tests[0]", code="assert f(1) == 1")
    assert cases_in({"tests": "assert f(1) == 1"}, "tests") == (asserts,)
    assert cases_in({"tests": ["assert f(1) == 1"]}, "tests") == (asserts,)
    table = {"stdin": "1", "stdout": "2"}
    assert cases_in({"io": [table, {"name": "b", "code": "f(1)"}]}, "io") == (
        TestCase("io[0]", stdin="1", stdout="2"),
        TestCase("b", code="f(1)"),
    )


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ([], r"the row's tests are no list of tests, but \[\]"),
        (None, "the row's tests are no list of tests, but None"),
        (7, "the row's tests are no list of tests, but 7"),
        ([""], r"the row's tests\[0\] is no test: write .*, not ''"),
        (["f(1)", 3], r"the row's tests\[1\] is no test"),
        ([{"stdin": "1"}], r"the row's tests\[0\] is no test"),
        ([{"stdin": "1", "code": "f(1)"}], r"the row's tests\[0\] is no test"),
        ([{"stdout": 1}], r"the row's tests\[0\] is no test"),
        ([{"stdout": "1", "input": "2"}], r"the row's tests\[0\] is no test"),
    ],
)
def test_what_is_no_test_is_named(tests: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        cases_in({"tests": tests}, "tests")


def test_a_row_without_tests_names_its_columns() -> None:
    with pytest.raises(TaskError, match="the row has no column tests with tests; found are prompt, answer"):
        cases_in({"prompt": "p", "answer": "a"}, "tests")
