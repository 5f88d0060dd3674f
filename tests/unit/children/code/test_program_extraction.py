"""The code in an answer."""

import pytest

from asyncrl.children.code.program_extraction import code_in

CODE = "def f(x):\n    return x\n"
DRAFT = "def f(x):\n    return 0\n"
HELPER = "def g(x):\n    return x\n"
USES = "def f(x):\n    return g(x)\n"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (CODE, CODE),
        (f"Sure:\n```python\n{CODE}```\nor\n```\nother\n```", CODE),
        (f"```python\n{DRAFT}```\nNo:\n```python\n{CODE}```", CODE),
        (f"```\n{DRAFT}```\nNo:\n```\n{CODE}```\nIt prints\n```\n1\n```", CODE),
        (f"```bash\npip install x\n```\n```python\n{CODE}```\n```text\n1\n```", CODE),
        (f"```Python3\n{CODE}```\nUse it:\n```python\nprint(f(1))\n```", CODE),
        (f"```{{.python}}\n{CODE}```\n```python\nassert f(1) == 1\n```", CODE),
        (f"~~~python\n{CODE}~~~\n", CODE),
        (f"````python\n{CODE}````\n", CODE),
        ("1. So:\n   ```python\n   def f(x):\n       return x\n   ```\n", CODE),
        ("- ```python\n  def f(x):\n      return x\n  ```\n", CODE),
        ("> ```python\n> def f(x):\n>     return x\n> ```\n", CODE),
        ("```python\n    def f(x):\n        return x\n```", CODE),
        ("```python\r\ndef f(x):\r\n    return x\r\n```", CODE),
        (f"```python\n{HELPER}```\nand\n```python\n{USES}```", HELPER + USES),
        (f"```python\n{HELPER}```\n```python\nprint(g(int(input())))\n```", HELPER + "print(g(int(input())))\n"),
        ("```python\nprint(1)\n```\nor\n```python\nprint(2)\n```", "print(2)\n"),
        ("```bash\nrm -r x\n```", ""),
        ("```python\n```", ""),
        (f"```\n{CODE}", CODE),
        (f"  ```py\n{CODE}  ```", CODE),
        ("x = 'a ``` b'", "x = 'a ``` b'"),
        ("", ""),
    ],
)
def test_code_is_the_last_program_in_fenced_blocks_or_everything(answer: str, code: str) -> None:
    assert code_in(answer, {}) == code


def test_what_the_row_has_before_the_code_comes_first() -> None:
    row = {"before": 'def f(x):\n    """Return x."""\n'}
    assert code_in("    return x", row) == 'def f(x):\n    """Return x."""\n    return x'
    assert code_in(f"```\n{CODE}```", row) == f"{row['before']}\n{CODE}"
    assert code_in("x", {"before": None}) == "x"
    assert code_in("```\n    return x\n```\n```\nprint(f(3))\n```", row) == f"{row['before']}\n    return x\n"
    assert code_in(" ", row) == code_in("```bash\nls\n```", row) == ""


def test_the_first_of_several_programs_can_be_chosen() -> None:
    answer = f"```bash\nls\n```\n```python\n{CODE}```\nor\n```python\n{DRAFT}```"
    assert code_in(answer, {}, "first") == CODE


def test_many_fences_are_read_in_time() -> None:
    many = "```python\n" * 20_000 + "def f(x): return x\n" * 20_000
    assert code_in(many, {})
