"""Commands that can be copied and run."""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import install_hints
from asyncrl.config.install_hints import install_extra, pip_install, program


def test_the_interpreter_that_runs_installs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert pip_install("torch") == ".venv/bin/python -m pip install torch"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pip_install("gguf>=0.10") == f"{tmp_path}/.venv/bin/python -m pip install 'gguf>=0.10'"


def test_an_extra_of_a_checkout_is_installed_from_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install_hints, "_checkout", lambda: tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.chdir(tmp_path)
    assert install_extra("wandb") == "python -m pip install -e '.[wandb]'"
    (tmp_path / "constraints.txt").touch()
    assert install_extra("wandb") == "python -m pip install -c constraints.txt -e '.[wandb]'"


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({}, "python -m pip install -e '.[wandb]', in a checkout of asyncrl"),
        (
            {"url": "file:///src/asyncrl", "dir_info": {}},
            "python -m pip install 'asyncrl[wandb] @ file:///src/asyncrl'",
        ),
        (
            {"url": "https://example.org/asyncrl.git", "vcs_info": {"vcs": "git", "commit_id": "1a"}},
            "python -m pip install 'asyncrl[wandb] @ git+https://example.org/asyncrl.git'",
        ),
        (
            {"url": "file:///tmp/asyncrl-0.1.0-py3-none-any.whl", "archive_info": {}},
            "python -m pip install 'asyncrl[wandb] @ file:///tmp/asyncrl-0.1.0-py3-none-any.whl'",
        ),
    ],
)
def test_an_extra_is_installed_from_where_asyncrl_came_from(
    origin: dict[str, Any], command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install_hints, "_origin", lambda: origin)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.chdir(tmp_path)
    assert install_extra("wandb") == command


def test_the_command_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = [*shlex.split(pip_install("--help")), "--disable-pip-version-check"]
    assert "pip install [options]" in subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


SCRIPT = f"#!{sys.executable}\nfrom asyncrl.config.install_hints import program\nprint(program())\n"


def install_at(folder: Path) -> Path:
    """A script `asyncrl` that only says what to type for it."""
    folder.mkdir(parents=True)
    script = folder / "asyncrl"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    return script


def typed(command: str, here: Path, *paths: Path) -> str:
    """What a shell that stands `here` and has these folders in its PATH is told when this is typed."""
    path = os.pathsep.join([*map(str, paths), "/usr/bin", "/bin"])
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        ["sh", "-c", command], cwd=here, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_what_to_type_is_what_was_typed_unless_the_bare_name_will_do(tmp_path: Path) -> None:
    script = install_at(tmp_path / "home" / ".venv" / "bin")
    other = install_at(tmp_path / "other")
    home = tmp_path / "home"
    assert typed(".venv/bin/asyncrl", home) == ".venv/bin/asyncrl"
    assert typed(f"{script}", tmp_path) == str(script)
    assert typed(".venv/bin/asyncrl", home, other.parent) == ".venv/bin/asyncrl", "another installation's is no help"
    assert typed("asyncrl", tmp_path, script.parent) == "asyncrl"
    assert typed(".venv/bin/asyncrl", home, script.parent) == "asyncrl"
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "asyncrl").symlink_to(script)
    assert typed("asyncrl", home, tmp_path / "links") == "asyncrl"


def test_a_process_that_is_no_script_names_the_script_that_is_installed_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.setenv("PATH", "/usr/bin")
    scripts = install_at(tmp_path / "my venv" / "bin").parent
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(scripts))
    monkeypatch.chdir(tmp_path)
    assert shlex.split(program()) == ["my venv/bin/asyncrl"]
    monkeypatch.chdir(scripts)
    assert program() == "./asyncrl"
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert program().endswith(" -m asyncrl.deploy.cli")
