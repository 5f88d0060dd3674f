"""The command line: quick to answer, plain about mistakes, exit codes that mean something."""

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from asyncrl.config.install_hints import program
from asyncrl.deploy import cli
from asyncrl.errors import ConfigError, FleetFailed, Interrupted, JournalError, RewardError, TaskError
from tests import golden

HEAVY = ("pydantic", "torch", "numpy", "rich", "zmq", "transformers", "asyncio")
MOST_MODULES = 200
"""Modules that such an answer imports, three quarters of them for argparse; an import costs some 0.3 ms."""


def answer(*arguments: str) -> tuple[int, set[str]]:
    """Exit code and modules imported of one command in a fresh process."""
    program = (
        "import sys; from asyncrl.deploy.cli import main; code = main(sys.argv[1:]);"
        "print('\\n' + ' '.join(sys.modules)); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(("arguments", "code"), [(["rnu"], 2), (["run", "--help"], 0)])
def test_help_and_mistyped_commands_are_quick_and_import_nothing_heavy(arguments: list[str], code: int) -> None:
    found, modules = answer(*arguments)
    assert found == code
    assert not modules & set(HEAVY)
    assert len(modules) <= MOST_MODULES


def test_help_names_every_command_and_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    golden.says(capsys.readouterr().out.replace(program(), "asyncrl"), "130")
    files = {path.stem for path in cli.FOLDER.glob("*.py") if "\ndef main(" in path.read_text()}
    assert files <= cli.commands().keys(), "each has a description that begins with its name"


def test_no_command_at_all_is_a_mistake_answered_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: asyncrl COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("name", cli.commands())
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main([name, "--help"])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 0
    assert f"usage: asyncrl {name}" in capsys.readouterr().out


def raising(error: BaseException) -> Callable[[list[str]], int]:
    def fail(arguments: list[str]) -> int:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("write this instead"), 2),
        (TaskError("no column prompt"), 2),
        (RewardError("it raised KeyError"), 2),
        (FleetFailed("resume with this"), 75),
        (Interrupted("the newest checkpoint is of step 3"), 130),
        (JournalError("contradicts itself"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 0),
    ],
)
def test_errors_become_a_sentence_and_an_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("fake")
    vars(module)["main"] = raising(error)
    monkeypatch.setattr(cli, "import_module", lambda name: module)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert cli.main(["run"]) == code
    assert str(error) in capsys.readouterr().err


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fake")
    vars(module)["main"] = raising(AssertionError("ours"))
    monkeypatch.setattr(cli, "import_module", lambda name: module)
    with pytest.raises(AssertionError):
        cli.main(["run"])


def test_a_closed_pipe_ends_quietly() -> None:
    program = f"{sys.executable} -m asyncrl.deploy.cli keys | head -1"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("name  (text")
    assert done.stderr == ""
