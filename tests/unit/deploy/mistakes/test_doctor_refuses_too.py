"""`asyncrl doctor` fails whatever `asyncrl run` refuses before its first step, and says the same."""

import shlex
from pathlib import Path
from types import ModuleType

import pytest

from asyncrl.deploy import cli
from asyncrl.deploy.checks.machine import Check
from asyncrl.deploy.commands import doctor
from tests.unit.deploy.mistakes import (
    test_mistakes_in_commands,
    test_mistakes_in_files,
    test_mistakes_in_models_and_rewards,
)
from tests.unit.deploy.mistakes.mistake import Mistake, write

RUN = "run mine.toml"
DOCTOR = "doctor mine.toml"
OF_THE_COMMAND = ("--run-dir", "--listen", "--on", "--address", "--restarts", "--accept-changes", "--print-config")
"""Flags that only `run` has."""


def mistakes(module: ModuleType) -> list[Mistake]:
    """All mistakes by which the tests of a module are parametrised."""
    marks = [mark for test in vars(module).values() for mark in getattr(test, "pytestmark", [])]
    found = [param.values[0] for mark in marks if mark.args[:1] == ("mistake",) for param in mark.args[1]]
    return [each for each in found if isinstance(each, Mistake)]


REFUSED = [
    mistake
    for module in (test_mistakes_in_commands, test_mistakes_in_files, test_mistakes_in_models_and_rewards)
    for mistake in mistakes(module)
    if mistake.typed.startswith(RUN) and mistake.code == 2 and not any(flag in mistake.typed for flag in OF_THE_COMMAND)
]


def test_the_refusals_are_found() -> None:
    assert len(REFUSED) > 80


@pytest.mark.parametrize("mistake", REFUSED, ids=lambda mistake: mistake.name)
def test_doctor_fails_what_a_run_refuses(
    mistake: Mistake, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "machine_checks", list)
    monkeypatch.setattr(doctor, "fork_check", lambda: Check("forked workers", "ok", ""))
    write(workplace, mistake)
    for name, value in mistake.environ.items():
        monkeypatch.setenv(name, value)
    code = cli.main(shlex.split(mistake.typed.replace(RUN, DOCTOR, 1)))
    shown = capsys.readouterr()
    printed = " ".join(f"{shown.out}{shown.err}".split())
    expected = [mistake.says] if isinstance(mistake.says, str) else list(mistake.says)
    assert code in (1, 2), printed
    assert [text for text in expected if " ".join(text.removeprefix("asyncrl: ").split()) not in printed] == [], printed
