"""The processes that workers are forked from, started by fork_client.py.

    python -m asyncrl.deploy.process.fork_server PARENT PLAIN TORCH MODULE ...

PARENT is the controller's pid, PLAIN and TORCH are descriptors of Unix sockets.

    controller ──exec──> plain ── has imported what every worker needs, without torch
                           └──fork──> torch ── has imported MODULE ... as well: torch, transformers

Each of the two answers requests on its socket: {"name": text} with two descriptors, the worker's standard input and its
output, is answered with {"pid": number}, or with {"refused": text} where a fork would not be safe: a forked process
inherits every lock as it was at that moment, but only the thread that forked. So there must be one thread (an OpenMP
team has more), no CUDA context and no socket but the one that requests come from.

A worker is a grandchild: the process between ends at once, so the worker becomes a child of the controller, which made
itself a subreaper (prctl(2)) for that moment. It lives on when these two processes are killed.
"""

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.deploy.process import worker_main
from asyncrl.engines.models.lean_imports import import_less

REQUEST_BYTES = 4096
FAILED = 70
"""Exit status of a forked process whose worker could not even begin."""


def main(parent: int, plain: int, torch: int, modules: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker_main.die_with(parent)
    gc.disable()  # Nothing of what is imported becomes garbage.
    me = os.getpid()
    second = os.fork()
    if second == 0:
        os.close(plain)
        worker_main.die_with(me)
        worker_main.rename("asyncrl torch", f"asyncrl fork server (torch) of {parent}")
        for module in modules:
            import_module(module)
        serve(torch, {"torch": os.getpid()})
    os.close(torch)
    worker_main.rename("asyncrl plain", f"asyncrl fork server (plain) of {parent}")
    serve(plain, {"plain": me})


def serve(descriptor: int, pids: Mapping[str, int]) -> NoReturn:
    """Reports that all is imported, with the process's own pid by its stage; answers requests until nobody can."""
    with socket.socket(fileno=descriptor) as channel:
        gc.freeze()  # The collector of a forked process would write to the pages of every object.
        _send(channel, {"ready": pids})
        while True:
            data, descriptors, _, _ = socket.recv_fds(channel, REQUEST_BYTES, 2)
            if not data:
                os._exit(0)
            _send(channel, _answer(json.loads(data), descriptors, channel))
            for each in descriptors:
                os.close(each)


def _send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    try:
        channel.send(json.dumps(message).encode())
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # The controller is gone.


def _answer(request: Mapping[str, Any], descriptors: Sequence[int], channel: socket.socket) -> Mapping[str, Any]:
    if why := what_forbids_a_fork({channel.fileno(), *descriptors}):
        return {"refused": why}
    source, output = descriptors
    return {"pid": _forked_grandchild(lambda: _become_a_worker(request["name"], source, output, channel))}


def what_forbids_a_fork(known: set[int]) -> str:
    """Returns why a fork would be unsafe, or "" when it is safe. known: descriptors that may be sockets."""
    status = Path("/proc/self/status").read_text()
    threads = int(status.split("Threads:")[1].split()[0])
    if threads != 1:
        return f"the process to fork from has {threads} threads instead of one"
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            opened = os.readlink(descriptor)
        except FileNotFoundError:
            continue  # The one that this very loop reads the folder through.
        if opened.startswith("/dev/nvidia"):
            return f"the process to fork from uses a GPU ({opened} is open)"
        if opened.startswith("socket:") and int(descriptor.name) not in known:
            return f"the process to fork from has a socket open (descriptor {descriptor.name})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the process to fork from has a CUDA context"
    return ""


def _forked_grandchild(run: Callable[[], NoReturn]) -> int:
    """Returns the pid of a process that runs this; its parent has ended when this returns."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            os.close(reading)
            grandchild = os.fork()
            if grandchild == 0:
                os.close(writing)
                run()
            os.write(writing, str(grandchild).encode())
        finally:
            os._exit(FAILED)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        pid = int(pipe.read())
    os.waitpid(between, 0)
    return pid


def _become_a_worker(name: str, source: int, output: int, channel: socket.socket) -> NoReturn:
    """Begins as a spawned worker does: with three descriptors, in a process group of its own."""
    for given, standard in ((source, 0), (output, 1), (output, 2)):
        os.dup2(given, standard)
    os.close(source)
    os.close(output)
    channel.close()
    os.setpgid(0, 0)
    worker_main.rename(name, f"asyncrl worker {name}")
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # Python's own generator seeds itself anew after a fork.
    gc.enable()
    worker_main.main()


if __name__ == "__main__":
    import_less()
    parent, plain, torch = map(int, sys.argv[1:4])
    main(parent, plain, torch, sys.argv[4:])
