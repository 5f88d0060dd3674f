"""Begins programs of tests in processes that were forked from one that imported this file (programs.py)."""

import atexit
import ctypes
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from asyncrl.deploy.process import fork_client, fork_server, worker_main

BLOCK = slice(47, 49)
"""Fields of /proc/PID/stat after the name of the process: addresses of the first byte of its variables and of the end
(proc(5), fields 50 and 51)."""
READ_ONCE = ("OMP_", "OPENBLAS_", "MALLOC_")
"""Beginnings of the variables that libraries read as they are loaded; they are loaded already."""
FAILED = 70
LOADED_WITH = {name: value for name, value in os.environ.items() if name.startswith(READ_ONCE)}
become_worker = worker_main.main
exec_servers = fork_client.start_servers


def main() -> NoReturn:
    """Becomes what the first line of the standard input asks for: a program, or a worker."""
    if sys.stdin.buffer.peek(1)[:1] != b"{":
        become_worker()
    request = json.loads(sys.stdin.buffer.readline())
    _set_up(request)
    fork_client.start_servers = fork_servers
    status = FAILED
    try:
        status = _status_of(request["arguments"])
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _set_up(request: Mapping[str, Any]) -> None:
    """Gives this process what Popen and a fresh Python would give it."""
    _open_as(0, os.devnull, os.O_RDONLY)
    if request["errors"]:
        _open_as(2, request["errors"], os.O_WRONLY | os.O_APPEND)
    os.chdir(request["cwd"])
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(request["environment"])
    show_variables(before)
    worker_main.rename("python", " ".join([sys.executable, *request["arguments"]]))
    sys.stdout.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.invalidate_caches()


def _open_as(standard: int, path: str, flags: int) -> None:
    opened = os.open(path, flags)
    os.dup2(opened, standard)
    os.close(opened)


def show_variables(before: Mapping[str, str]) -> None:
    """Writes the variables of this process, those first that it did not have before, to where /proc/PID/environ shows
    them; the C library has copies of all."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[BLOCK])
    pairs = sorted(os.environ.items(), key=lambda pair: before.get(pair[0]) == pair[1])
    block = b"".join(f"{name}={value}\0".encode(errors="surrogateescape") for name, value in pairs)
    assert end > begin
    ctypes.memmove(begin, block[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def _status_of(arguments: Sequence[str]) -> int:
    """Runs `python ARGUMENTS` and returns its exit status."""
    try:
        _run(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _run(arguments: Sequence[str]) -> None:
    """Runs a module or a file as the main module, with the folders that Python would look for modules in."""
    added = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:0] = [folder for folder in added if folder not in sys.path[1:]]
    if arguments[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = ["-m", *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


class ForkedServers:
    """The process of a fork server that was forked, with what `Forks` uses of Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> None:
        """Waits for the end of a killed process, which the kernel does not put off."""
        os.waitpid(self.pid, 0)


def fork_servers(
    arguments: Sequence[str], sockets: Sequence[int], output: IO[bytes], environment: Mapping[str, str]
) -> "ForkedServers | subprocess.Popen[bytes]":
    """Starts fork servers that have imported everything already; in a fresh Python where a fork would not be the same:
    this process has threads, or libraries would read other variables."""
    differing = {name: value for name, value in environment.items() if name.startswith(READ_ONCE)} != LOADED_WITH
    if differing or "Threads:\t1\n" not in Path("/proc/self/status").read_text():
        return exec_servers(arguments, sockets, output, environment)
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return ForkedServers(pid)
    try:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for given, standard in ((nothing, 0), (output.fileno(), 1), (output.fileno(), 2)):
            os.dup2(given, standard)
        keep = {0, 1, 2, *sockets}
        for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if descriptor not in keep:
                _close(descriptor)
        os.environ.clear()
        os.environ.update(environment)
        parent, plain, torch = map(int, arguments[:3])
        fork_server.main(parent, plain, torch, arguments[3:])
    finally:
        os._exit(FAILED)


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        return  # The one that this folder was read through.


worker_main.main = main
