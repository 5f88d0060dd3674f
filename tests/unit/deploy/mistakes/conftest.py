"""Runs a command with a mistake in this process, in a folder of its own; no worker starts."""

import shlex
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from asyncrl.config.install_hints import program
from asyncrl.deploy import cli, run_setup
from asyncrl.deploy.process import fork_client
from tests.unit.deploy.mistakes.mistake import Answered, Mistake, check, write
from tests.unit.letter_model import write_letter_model


@pytest.fixture(scope="session")
def letter_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("letters") / "model"
    write_letter_model(folder)
    return folder


@pytest.fixture
def workplace(tmp_path: Path, letter_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model. A run that would start workers here fails the test."""

    def started(*_: object) -> None:
        pytest.fail("the mistake was not found before the workers start")

    shutil.copytree(letter_model, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_setup, "run_fleet", started)
    monkeypatch.setattr(run_setup, "forks_of", lambda *_: nullcontext())
    monkeypatch.setattr(fork_client, "forks_of", lambda *_: nullcontext())
    monkeypatch.setattr(fork_client, "early_forks", nullcontext)
    return tmp_path


@pytest.fixture
def answered(workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Answered:
    """answered(mistake) -> what was printed, after it was checked; the command leaves no files."""

    def answer(mistake: Mistake) -> str:
        write(workplace, mistake)
        for name, value in mistake.environ.items():
            monkeypatch.setenv(name, value)
        before = sorted(workplace.rglob("*"))
        code = cli.main(shlex.split(mistake.typed))
        shown = capsys.readouterr()
        printed = (shown.err or shown.out).replace(f"{program()} ", "asyncrl ")
        check(mistake, code, printed)
        assert [path for path in sorted(workplace.rglob("*")) if "__pycache__" not in path.parts] == before
        return printed

    return answer
