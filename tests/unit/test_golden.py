"""Golden messages: a changed, a missing, a superfluous and a stale one fail, and an update writes what is shown."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import golden

ROOT = Path(__file__).parents[2]
CASES = """
import pytest
from tests import golden

@pytest.mark.parametrize("number", [10, 2])
def test_numbers(number):
    golden.says(f"there are {number}", str(number))

def test_raised(tmp_path):
    with golden.raises(ValueError, match="line 2") as refused:
        raise ValueError(f"{tmp_path}/a.txt, line 2:\\n\\n  - indented \\x1b")
    assert isinstance(refused.value, ValueError)
    golden.says("a second message")

def test_silent():
    pass
"""
RECORDED = r"""test_numbers[10]
  - there are 10

test_numbers[2]
  - there are 2

test_raised
  - <tmp_path>/a.txt, line 2:

      - indented \x1b
  - a second message
"""


def pytest_on(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.golden", "-c", os.devnull, "--rootdir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def messages(tmp_path: Path) -> Path:
    """The file beside the tests in which CASES are."""
    (tmp_path / "test_cases.py").write_text(CASES)
    return tmp_path / "test_cases.messages.txt"


def test_an_update_writes_what_the_tests_say_as_they_stand_in_their_file(messages: Path) -> None:
    assert pytest_on(messages.parent, "--update-messages")[0] == 0
    assert messages.read_text() == RECORDED
    assert pytest_on(messages.parent)[0] == 0
    assert pytest_on(messages.parent, "--update-messages", "-n", "2")[0] != 0


def test_a_message_that_is_changed_missing_or_superfluous_fails_and_so_do_all_with_a_stale_one(messages: Path) -> None:
    changed = RECORDED.replace("there are 2", "there were 2").replace("  - a second message\n", "")
    messages.write_text(changed.replace("there are 10\n", "there are 10\n  - a second message\n"))
    status, said = pytest_on(messages.parent)
    found = [
        text in said for text in ("another message", "has no such message", "no longer shows", "3 failed, 1 passed")
    ]
    assert (status, found) == (1, [True] * 4), said
    messages.write_text(RECORDED.replace("test_raised", "test_renamed"))
    status, said = pytest_on(messages.parent)
    assert (status, "tests that are gone" in said) == (1, True), said


def test_an_update_of_one_test_keeps_the_messages_of_others_and_one_of_all_drops_what_is_stale(messages: Path) -> None:
    stale = RECORDED.replace("there are", "there were") + "\ntest_gone\n  - nothing\n"
    messages.write_text(stale)
    assert pytest_on(messages.parent, "--update-messages", "test_cases.py::test_numbers[2]")[0] == 0
    assert messages.read_text() == stale.replace("there were 2", "there are 2")
    assert pytest_on(messages.parent, "--update-messages")[0] == 0
    assert messages.read_text() == RECORDED


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"{golden.CHECKOUT}/docs, {golden.CHECKOUT}-2", f"<checkout>/docs, {golden.CHECKOUT}-2"),
        (f"run {sys.prefix}/bin/python3 or {os.path.relpath(sys.prefix, ROOT)}/bin/asyncrl", "run python or asyncrl"),
        (
            f"{golden.CHECKOUT}/tests/golden.py, line 7; a.py, line 2",
            "<checkout>/tests/golden.py, line <number>; a.py, line 2",
        ),
        ("127.0.0.1:41234 of process 77", "127.0.0.1:<port> of process <pid>"),
        ("<f at 0x7f00aa11>, 12ab34cd, deadbeef, 12345678", "<f at <address>>, <hex>, deadbeef, 12345678"),
        ("after 0.31 s of 5 s  \n", "after <measured> s of 5 s"),
    ],
)
def test_what_changes_from_run_to_run_has_a_name(text: str, shown: str, tmp_path: Path) -> None:
    assert golden.normalised(text, tmp_path.parent) == shown


def test_cases_are_those_of_the_file(messages: Path) -> None:
    messages.write_text("test_a[x = 1]\n  - one\n\ntest_b[y]\n  - b\n\ntest_a[new\\nline]\n")
    assert golden.cases(str(messages.with_name("test_cases.py")), "test_a") == ["x = 1", "new\nline"]
    with pytest.raises(AssertionError, match="has no cases of test_c"):
        golden.cases(str(messages.with_name("test_cases.py")), "test_c")


def test_every_file_of_messages_lies_beside_its_tests() -> None:
    assert [
        each
        for each in ROOT.glob("tests/**/*.messages.txt")
        if not Path(f"{each}".replace(".messages.txt", ".py")).exists()
    ] == []
