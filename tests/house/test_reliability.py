"""complaints.md: every complaint has a link and a test; every test that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = Path(__file__).with_name("complaints.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
ROWS = [line for line in TEXT.splitlines() if line.startswith("|") and not line.startswith(("| complaint", "|---"))]


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_tests_named_in_reliability_exist(file: str) -> None:
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert {name for named, name in NAMED if named == file} <= defined


def test_every_complaint_has_a_link_and_a_test() -> None:
    assert len(ROWS) > 30
    for row in ROWS:
        complaint, _, tests = row.strip("|").split(" | ")
        assert re.search(r"\]\(https://github\.com/\S+/(issues|pull)/\d+\)", complaint), row
        found = re.findall(r"`([^`]+)`", tests)
        assert found, row
        assert all(re.fullmatch(r"tests/[\w/]+\.py::test_\w+", name) for name in found), row
