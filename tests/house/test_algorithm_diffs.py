"""docs/algorithms.md shows how pages follow from one another: each diff, applied to the one page, gives the other."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = "asyncrl/algorithms"
BLOCKS: list[str] = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/algorithms.md").read_text(), re.DOTALL)
HEADER = re.compile(rf"--- {PAGES}/(\w+)\.py\n\+\+\+ {PAGES}/(\w+)\.py\n")
FIRST = "grpo"
"""The page that the others come from, by one diff or several."""


def code(source: str) -> list[str]:
    """Lines of the page's functions, without docstrings and empty lines."""
    found: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            hidden = range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1) if ast.get_docstring(node) else ()
            numbers = [number for number in range(node.lineno, (node.end_lineno or 0) + 1) if number not in hidden]
            found += [source.splitlines()[number - 1] for number in numbers]
    return [line for line in found if line.strip()]


def page(name: str) -> list[str]:
    return code((ROOT / PAGES / f"{name}.py").read_text())


def applied(diff: str, lines: list[str]) -> list[str]:
    """The lines with every hunk of the diff applied; the context of each must be found, once, behind the one before."""
    position = 0
    for hunk in re.split(r"^@@.*\n", HEADER.sub("", diff), flags=re.MULTILINE):
        shown = [line for line in hunk.splitlines() if line[1:].strip()]
        old, new = ([line[1:] for line in shown if line[0] in sides] for sides in (" -", " +"))
        places = [at for at in range(position, len(lines)) if old and lines[at : at + len(old)] == old]
        if shown:
            assert len(places) == 1, f"these lines are in the page {len(places)} times:\n" + "\n".join(old)
            lines = [*lines[: places[0]], *new, *lines[places[0] + len(old) :]]
            position = places[0] + len(new)
    return lines


@pytest.mark.parametrize("block", BLOCKS)
def test_a_diff_that_is_shown_leads_from_the_one_page_to_the_other(block: str) -> None:
    named = HEADER.match(block)
    assert named, (
        f"a diff begins with the lines `--- {PAGES}/NAME.py` and `+++ {PAGES}/NAME.py`, not with {block[:80]!r}"
    )
    assert applied(block, page(named[1])) == page(named[2])


def test_every_page_is_shown_as_a_diff() -> None:
    pages = {path.stem for path in (ROOT / PAGES).glob("*.py") if "\nPAGE = " in path.read_text()}
    assert {named[2] for block in BLOCKS if (named := HEADER.match(block))} == pages - {FIRST}
