"""Commands that can be copied and run."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import installing
from asyncrl.installing import install_extra, pip_install


def test_the_interpreter_that_runs_installs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert pip_install("torch") == ".venv/bin/python -m pip install torch"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pip_install("gguf>=0.10") == f"{tmp_path}/.venv/bin/python -m pip install 'gguf>=0.10'"


def test_an_extra_of_a_checkout_is_installed_from_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installing, "_checkout", lambda: tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.chdir(tmp_path)
    assert install_extra("wandb") == "python -m pip install -e '.[wandb]'"
    (tmp_path / "constraints.txt").touch()
    assert install_extra("wandb") == "python -m pip install -c constraints.txt -e '.[wandb]'"
    monkeypatch.setattr(installing, "_checkout", lambda: None)
    assert install_extra("wandb") == "python -m pip install 'asyncrl[wandb]'"


def test_the_command_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = [*shlex.split(pip_install("--help")), "--disable-pip-version-check"]
    assert "pip install [options]" in subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
