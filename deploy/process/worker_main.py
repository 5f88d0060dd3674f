"""The main function of a worker process, which local_launcher.py spawns as a module or fork_server.py forks.

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
from pathlib import Path
from typing import NoReturn

from asyncrl.concurrency import gather, unwrap
from asyncrl.engines.models.lean_imports import import_less
from asyncrl.fleet.worker.lane_access import admit_on, worker_keys
from asyncrl.fleet.worker.process_memory import gc_frozen
from asyncrl.fleet.worker.service import load_implementation
from asyncrl.fleet.worker.worker_runtime import run_worker
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.control.wire import InprocWire, WireByScheme
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.weights.handover import WeightHandover

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
ARGUMENTS = slice(45, 47)
"""Fields of /proc/PID/stat after the name of the process: addresses of the first byte of its arguments and of the end
(proc(5), fields 48 and 49)."""
ORPHANED = 3
"""Exit status of a worker whose parent is gone, so that nothing reads it."""


def main() -> NoReturn:
    """Serves, and ends the process."""
    status = 1
    try:
        faulthandler.enable()
        # A terminal sends Ctrl-C to the whole group of processes; the parent decides when workers stop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parent, _, line = sys.stdin.buffer.readline().partition(b" ")
        if not line:
            os._exit(ORPHANED)
        die_with(int(parent))
        asyncio.run(_run(WorkerSpec.from_json(line)))
        status = 0
    finally:
        if (error := sys.exc_info()[1]) is not None:
            traceback.print_exception(unwrap(error))
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: that would wait for a compute thread that may never come back.
        os._exit(status)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, also where its event loop or the GIL is stuck."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ORPHANED)  # It died before this took effect.


def rename(name: str, command: str) -> None:
    """Sets the name that `top` shows, and the command line of `ps -ef`: it is written over the arguments, which a
    forked process has from the one it was forked from."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15])
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[ARGUMENTS])
    if (room := end - begin) > 1:  # Both are 0 where this user may not see them.
        ctypes.memmove(begin, command.encode()[: room - 1].ljust(room, b"\0"), room)


async def _run(spec: WorkerSpec) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    threading.Thread(target=_watch_stdin, args=(loop, stop), name="stdin", daemon=True).start()
    load_implementation(spec.implementation)
    with gc_frozen():
        if spec.guest is None:
            await _serve(spec, stop, None)
        else:
            handover = WeightHandover()
            await gather(_serve(spec, stop, handover), _serve(spec.guest, stop, handover))


async def _serve(spec: WorkerSpec, stop: asyncio.Event, handover: WeightHandover | None) -> None:
    network = ZmqWire(worker_keys(spec))
    wire = WireByScheme(InprocWire(), network)
    try:
        await run_worker(spec, wire, stop, admit=admit_on(network, spec), handover=handover)
    finally:
        wire.close()


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    for line in sys.stdin.buffer:
        if line == b"stop\n":
            loop.call_soon_threadsafe(stop.set)
    os._exit(ORPHANED)


if __name__ == "__main__":
    import_less()
    main()
