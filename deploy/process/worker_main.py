"""The main of a worker process: `python -m asyncrl.deploy.worker`, started by deploy/local.py.

stdin: one line with the parent's pid and the worker's specification; then "stop" to finish, or its end, which means
that the parent is gone. Imports no torch: the service does.
"""

import asyncio
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback

from asyncrl.compute import ThreadCompute
from asyncrl.errors import lone
from asyncrl.launch import WorkerSpec
from asyncrl.long_lived import long_lived
from asyncrl.wire.auth import CurveKeys
from asyncrl.wire.ends import Wires
from asyncrl.wire.inproc import InprocWire
from asyncrl.wire.socket import ZmqWire
from asyncrl.worker import load, run_worker

PR_SET_PDEATHSIG = 1
ORPHANED = 3
"""Exit status of a worker whose parent is gone; nobody is there to read it."""


def main() -> None:
    status = 1
    try:
        faulthandler.enable()
        # A terminal sends Ctrl-C to the whole group of processes; the parent decides when workers stop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parent, _, line = sys.stdin.buffer.readline().partition(b" ")
        _die_with(int(parent))
        asyncio.run(_run(WorkerSpec.from_json(line)))
        status = 0
    finally:
        if (error := sys.exc_info()[1]) is not None:
            traceback.print_exception(lone(error))
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: that would wait for a compute thread that may never come back.
        os._exit(status)


def _die_with(parent: int) -> None:
    """The kernel kills this process when its parent dies, also where its event loop or the GIL is stuck."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ORPHANED)  # It died before the kernel was told.


async def _run(spec: WorkerSpec) -> None:
    stop = asyncio.Event()
    watch = threading.Thread(target=_watch_stdin, args=(asyncio.get_running_loop(), stop), name="stdin", daemon=True)
    watch.start()
    keys = CurveKeys(*spec.facts.curve) if spec.facts.curve else None
    wire = Wires(InprocWire(), ZmqWire(keys))
    try:
        load(spec.implementation)
        with long_lived():
            await run_worker(spec, wire, ThreadCompute, stop)
    finally:
        wire.close()


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    for line in sys.stdin.buffer:
        if line == b"stop\n":
            loop.call_soon_threadsafe(stop.set)
    os._exit(ORPHANED)


if __name__ == "__main__":
    main()
