"""The wheel holds only asyncrl/, with the mounted folders as real files and without what a user does not run, and its
commands work away from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORTS = "import asyncrl.services, asyncrl.protocols, asyncrl.deploy, asyncrl.bench, asyncrl; print(asyncrl.__file__)"


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT), cwd=target)
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_holds_only_asyncrl(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name.split("/")[0]}
    assert tops == {"asyncrl"}
    for needed in ("services/generation.py", "protocols/batch.py", "deploy/cli.py", "experiments/quickstart.toml"):
        assert f"asyncrl/{needed}" in names


def test_the_wheel_holds_no_tests_results_or_logs(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel).infolist()
    folders = {"tests", "results", "runs", "logs", "docs", "site", "__pycache__"}
    strange = {"log", "jsonl", "pyc", "out", "safetensors"}
    found = [
        each.filename
        for each in files
        if folders & {*Path(each.filename).parts} or Path(each.filename).suffix[1:] in strange
    ]
    assert not found
    assert not [each.filename for each in files if each.file_size > 100_000], "what a command reads is smaller"


def test_the_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(home), str(wheel), cwd=tmp_path)
    where = run(sys.executable, "-c", IMPORTS, cwd=tmp_path, PYTHONPATH=str(home))
    assert Path(where.strip()).is_relative_to(home)
    place = {"cwd": tmp_path, "PYTHONPATH": str(home)}
    assert "trains an experiment" in run(sys.executable, str(home / "bin/asyncrl"), "--help", **place)
    assert "reward0.0" in run(sys.executable, str(home / "bin/asyncrl"), "plan", "quickstart", **place)
    assert "overlap" in run(sys.executable, str(home / "bin/asyncrl-bench"), "--help", **place)
    written = run(sys.executable, str(home / "bin/asyncrl-bench"), "learning", "--report", **place)
    assert written.splitlines() == ["written: docs/learning.md", "written: bench/results/learning.md"]
