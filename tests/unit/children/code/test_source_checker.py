"""The checker of sources: what does not compile, what the linter finds, and what it leaves alone."""

import pytest

from asyncrl.children.code.source_checker import checked


@pytest.mark.parametrize(
    "source",
    ["def f(x): return x+", "return 3", "\0", "\ud800", "(" * 300, "-" * 100_000 + "1", "def f(a, a): pass"],
    ids=lambda source: repr(source[:12]),
)
def test_a_source_that_python_refuses_has_the_reason(source: str) -> None:
    check = checked(source)
    assert check["error"]
    assert check["findings"] == []


def test_a_reason_names_the_line() -> None:
    assert checked("x = 1\nx = = 2\n")["error"] == "SyntaxError: invalid syntax (line 2)"


FINDINGS = {
    "def f(x): return x+1;": "line 1: a semicolon ends the line",
    "try:\n    print()\nexcept:\n    pass": "line 3: a bare `except` catches everything",
    "def f(a=[]): return a": "line 1: a default value is mutable, and calls share it",
    "def f(x): return x == None": "line 1: None is compared with `==`, not with `is`",
    "f = lambda x: x": "line 1: the lambda f should be a function",
    "from os import *": "line 1: an import of `*` hides which names there are",
    "print(f'a')": "line 1: an f-string has nothing to fill in",
    "assert (1, 'text')": "line 1: assertion is always true, perhaps remove parentheses?",
    "def f():\n    return 1\n    print()": "line 3: it is never reached",
    "1 + 1": "line 1: it has no effect",
    "def f(): return y": "nothing defines the name y",
    "import os": "nothing reads the import os",
    "def f():\n    y = 1": "nothing reads the variable y",
    "print(1 is 1)": 'line 1: "is" with a literal. Did you mean "=="?',
}


@pytest.mark.parametrize("source", FINDINGS, ids=lambda source: source.split("\n")[-1])
def test_a_mistake_of_style_is_found(source: str) -> None:
    check = checked(source)
    assert check["error"] == ""
    assert FINDINGS[source] in check["findings"]


@pytest.mark.parametrize(
    "source",
    [
        "def f(x): return x+1",
        "'text'\ndef f():\n    'text'\n    ...",
        "def f():\n    y = 1\n    def g(): return y\n    return g",
        "def f(n):\n    k: int = n\n    return [k for _ in range(n)]",
        "def f(x):\n    for i in range(3):\n        x += 1\n    return x",
        "def f():\n    global q\n    q = 2\nprint(q)",
        "import a.b\na.b()",
        "class A:\n    x = 1\n    def m(self): return __class__",
        "def f(x):\n    _, y = x\n    return y",
        "exec('y = 1')\nprint(y)",
        "x = 1\nfor x in (x,):\n    print(x); print(x)",
    ],
)
def test_ordinary_code_has_no_findings(source: str) -> None:
    assert checked(source) == {"error": "", "findings": []}


def test_findings_are_bounded() -> None:
    assert len(checked("\n".join(f"{number} + 1" for number in range(100)))["findings"]) == 20
