"""docs/algorithms/presets.md shows how algorithms differ: each diff, applied to one file, gives the other."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALGORITHMS = "asyncrl/algorithms"
BLOCKS: list[str] = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/algorithms/presets.md").read_text(), re.DOTALL)
HEADER = re.compile(rf"--- {ALGORITHMS}/(\w+)\.py\n\+\+\+ {ALGORITHMS}/(\w+)\.py\n")
FIRST = "grpo"
"""The algorithm that the others come from, by one diff or several."""


def code(source: str) -> list[str]:
    """Returns the lines of the functions, without docstrings and empty lines."""
    found: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            hidden = range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1) if ast.get_docstring(node) else ()
            numbers = [number for number in range(node.lineno, (node.end_lineno or 0) + 1) if number not in hidden]
            found += [source.splitlines()[number - 1] for number in numbers]
    return [line for line in found if line.strip()]


def functions_of(name: str) -> list[str]:
    return code((ROOT / ALGORITHMS / f"{name}.py").read_text())


def applied(diff: str, lines: list[str]) -> list[str]:
    """Applies every hunk of the diff; the context of each must be found once, behind the hunk before."""
    position = 0
    for hunk in re.split(r"^@@.*\n", HEADER.sub("", diff), flags=re.MULTILINE):
        shown = [line for line in hunk.splitlines() if line[1:].strip()]
        old, new = ([line[1:] for line in shown if line[0] in sides] for sides in (" -", " +"))
        places = [at for at in range(position, len(lines)) if old and lines[at : at + len(old)] == old]
        if shown:
            assert len(places) == 1, f"these lines are in the file {len(places)} times:\n" + "\n".join(old)
            lines = [*lines[: places[0]], *new, *lines[places[0] + len(old) :]]
            position = places[0] + len(new)
    return lines


@pytest.mark.parametrize("block", BLOCKS)
def test_a_shown_diff_leads_from_one_algorithm_to_the_other(block: str) -> None:
    named = HEADER.match(block)
    assert named, (
        f"begin a diff with `--- {ALGORITHMS}/NAME.py` and `+++ {ALGORITHMS}/NAME.py`, not with {block[:80]!r}"
    )
    assert applied(block, functions_of(named[1])) == functions_of(named[2])


def test_every_algorithm_is_shown_as_a_diff() -> None:
    shown = {path.stem for path in (ROOT / ALGORITHMS).glob("*.py") if "\nALGORITHM = " in path.read_text()}
    assert {named[2] for block in BLOCKS if (named := HEADER.match(block))} == shown - {FIRST}
