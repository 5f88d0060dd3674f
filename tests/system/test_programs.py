"""A program that begins in a forked process is what it is in a fresh Python (programs.py)."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from programs import ForkedProgram, finished

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]

SEEN = """
import atexit, inspect, json, os, signal, sys, threading
import beside, given

def mine(): pass

atexit.register(print, "the end", flush=True)
print(json.dumps({
    "argv": sys.argv,
    "main": [__name__, mine.__module__, sys.modules["__main__"].mine is mine, inspect.getsource(mine)],
    "cwd": os.getcwd(),
    "variables": {name: value for name, value in sorted(os.environ.items()) if name != "_"},
    "shown": b"MARK=a mark\\0" in open("/proc/self/environ", "rb").read(),
    "path": [folder for folder in sys.path[:2] if folder],
    "imports": [beside.__file__, given.__file__],
    "signals": [str(signal.getsignal(getattr(signal, name))) for name in ("SIGTERM", "SIGHUP", "SIGPIPE")],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "stdin": sys.stdin.read(),
    "threads": threading.active_count(),
}), flush=True)
print("an error", file=sys.stderr)
os.system("echo $MARK")
"""
ENDS = {"sys.exit(3)": 3, "sys.exit('no')": 1, "raise KeyError('mine')": 1, "": 0, "os._exit(5)": 5}
Begin = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def in_fresh_python(command: Sequence[str], **given: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **given)


@pytest.mark.parametrize("is_module", [False, True])
def test_program_sees_what_it_sees_in_a_fresh_python(is_module: bool, tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    (tmp_path / "beside.py").touch()
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "given.py").touch()
    program = ["-m", "seen"] if is_module else [str(tmp_path / "seen.py")]
    given: dict[str, Any] = {
        "env": {"PYTHONPATH": str(tmp_path / "more"), "MARK": "a mark", "LC_ALL": "C.UTF-8"},
        "cwd": tmp_path,
    }
    forked, fresh = (
        start([sys.executable, *program, "one", "two"], timeout=60, **given) for start in (finished, in_fresh_python)
    )
    assert json.loads(forked.stdout.splitlines()[-3]) == json.loads(fresh.stdout.splitlines()[-3])
    assert forked.stdout.splitlines()[-2:] == fresh.stdout.splitlines()[-2:] == ["a mark", "the end"]
    assert forked.stderr == fresh.stderr == "an error\n"
    assert forked.returncode == fresh.returncode == 0


@pytest.mark.parametrize("end", ENDS)
def test_program_ends_as_in_a_fresh_python(end: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(f"import os, sys\n{end}\n")
    forked, fresh = (
        start([sys.executable, str(tmp_path / "ends.py")], timeout=60) for start in (finished, in_fresh_python)
    )
    assert forked.returncode == fresh.returncode == ENDS[end]
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_program_is_told_and_killed_by_signals(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import time\ntry:\n    print('up', flush=True)\n    time.sleep(100)\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n    time.sleep(100)\n"
    )
    command = [sys.executable, str(tmp_path / "waits.py")]
    with ForkedProgram(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        assert program.stdout.readline() == "up\n"
        assert program.poll() is None
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "interrupted\n"
        program.kill()
        assert program.wait(20) == -signal.SIGKILL


def test_fork_servers_of_a_forked_run_are_forked_from_it(tmp_path: Path) -> None:
    """Also workers that need no torch are forked from what has it; in a fresh Python they are not."""
    (tmp_path / "run.py").write_text(
        "import asyncio, os\nfrom pathlib import Path\nfrom asyncrl.deploy.process.fork_client import early_forks\n"
        "with early_forks() as forks, open('output', 'wb') as output:\n"
        "    worker = asyncio.run(forks.fork('plain', 'name', output))\n"
        "    for pid in ('self', forks.pids['plain']):\n"
        "        print('libtorch' in Path(f'/proc/{pid}/maps').read_text())\n"
        "    worker.kill()\n    os.waitpid(worker.pid, 0)\n"
    )
    done = finished([sys.executable, "run.py"], cwd=tmp_path, timeout=60)
    assert done.stdout == "True\n" * 2, done.stderr
