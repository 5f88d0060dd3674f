"""Runs in the first process of a sandbox: waits for test cases, forks a process for each, watches its limits, kills
whatever it leaves running, and reports how it ended.

pool ── control socket: case and files ──> first process ── fork ──> case: stdin, stdout, stderr, note, link
pool <── report ──────────────────────────────┘    <── end of process, limits, note ──┘

The first process of a pid namespace cannot be killed from inside, and nobody may read its memory or open its files.
"""

from __future__ import annotations

import _ctypes
import _signal  # type: ignore[import-not-found]  # `signal` makes a start a third longer.
import _socket
import atexit
import builtins
import marshal
import posix
import resource
import select
import sys
import time

TYPE_CHECKING = False  # `typing` would double the time of a start.
if TYPE_CHECKING:
    from typing import Any

    Case = dict[str, Any]

PARTS: dict[str, bytes] = {}
"""Compiled code of the other files of this folder, by name."""
LOADED: dict[str, dict[str, Any]] = {}
"""Their names and what they stand for, once they are loaded."""

DESCRIPTORS = 8
NOTE = 3000
"""Bytes of the note that are reported."""
POLL = 0.05
"""Seconds between two looks at memory and files; most cases end before the first."""
POLL_SHARE = 10
"""Times that a look takes until the next one: looking at many processes takes long."""
NICE = 10
"""The fleet, and the first process, run before programs."""
FILES = 10_000
"""Files in a folder that a program may write; each takes a kilobyte of the kernel's memory."""
OPEN_FILES = 64
"""Files that a process may open: the buffers of sockets are memory that no other limit counts."""
SOCKET_BYTES = 208 * 1024
"""Bytes that the kernel keeps for one end of a socket. Where no cgroup counts them, each socket counts as full."""
PAGE = 4096
WRITABLE = ("/tmp", "/dev/shm")
FOUND: set[str] = set()
"""Names in these folders before the first case: none, but where the fleet's own packages lie below them."""
CONTAINED = posix.getpid() == 1
"""False where the pool runs programs without a sandbox: then other processes are not ours to look at."""
SIGKILL = 9
PR_SET_DUMPABLE = 4
ENOSPC = 28
EFBIG = 27
EAGAIN = 11
ENOMEM = 12


def main(parts: dict[str, bytes], descriptor: int) -> None:
    """Serves cases until the pool closes the socket. parts: for PARTS. descriptor: of the socket."""
    PARTS.update(parts)
    control = _socket.socket(fileno=descriptor)
    posix.set_inheritable(descriptor, False)
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # The only signal that Python handles.
    allow_reading_memory(False)
    if CONTAINED:
        FOUND.update(*map(posix.listdir, WRITABLE))
    control.send(b"ready")
    while True:
        message, ancillary, _, _ = control.recvmsg(64, _socket.CMSG_SPACE(4 * DESCRIPTORS), _socket.MSG_CMSG_CLOEXEC)
        if not message:
            posix._exit(0)
        files = [at for _, _, data in ancillary for at in descriptors(data)]
        if not files:
            continue  # The pool ends a case that has ended by itself.
        case = marshal.loads(everything(files[0]))
        posix.close(files[0])
        run_case(case, files[1:], control)
        for file in files[1:]:
            posix.close(file)


def descriptors(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 4], sys.byteorder) for at in range(0, len(data), 4)]


def everything(file: int) -> bytes:
    return posix.pread(file, posix.fstat(file).st_size, 0)


def allow_reading_memory(allowed: bool) -> None:
    """Says whether other processes of the same user may read the memory of this one and open its files."""
    # None is the program itself, which the types of dlopen do not say.
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # type: ignore[arg-type]
    _ctypes.call_function(prctl, (PR_SET_DUMPABLE, int(allowed), 0, 0, 0))


def run_case(case: Case, files: list[int], control: Any) -> None:
    """Forks the process of a case, waits for its end, and reports it."""
    if case["kind"] in PARTS and (prepare := part_of(case["kind"]).get("prepare")):
        prepare(case)
    reading, note = posix.pipe2(posix.O_CLOEXEC)
    began = time.monotonic()
    child = posix.fork()
    if child == 0:
        posix.close(control.detach())
        posix.close(reading)
        begin(case, files, note)
    posix.close(note)
    why = watch(case, child, files, control, began)
    status, cpu_seconds, memory, left = collect(child)
    posix.set_blocking(reading, False)
    try:
        text = posix.read(reading, NOTE)
    except BlockingIOError:
        text = b""
    posix.close(reading)
    numbers = f"{status} {time.monotonic() - began:.6f} {cpu_seconds:.6f} {memory} {int(left)} {why}\n"
    control.send(numbers.encode() + text)


def watch(case: Case, child: int, files: list[int], control: Any, began: float) -> str:
    """Waits until the child ends, the pool ends the case, or a limit is exceeded; returns which, or "-"."""
    end = posix.pidfd_open(child)
    waiting = select.poll()
    waiting.register(end, select.POLLIN)
    waiting.register(control.fileno(), select.POLLIN)
    pause = POLL
    try:
        while True:
            left = began + case["seconds"] - time.monotonic()
            ready = dict(waiting.poll(max(0.0, min(pause, left)) * 1000))
            if end in ready:
                return "-"
            if ready:
                return "ended"
            if left <= 0:
                return "timeout"
            looked = time.monotonic()
            if why := exceeded(case, files):
                return why
            pause = max(POLL, POLL_SHARE * (time.monotonic() - looked))
    finally:
        posix.close(end)


def exceeded(case: Case, files: list[int]) -> str:
    """Returns the limit that all processes of the case exceed by now, or ""."""
    states = map(posix.fstat, files[1:3])
    if any(max(state.st_size, 512 * state.st_blocks - PAGE) > case["output_bytes"] for state in states):
        return "output"
    if not CONTAINED:
        return ""
    most = case["memory_bytes"] - (0 if case["is_limited"] else SOCKET_BYTES * sockets())
    if sum(map(resident_bytes, others())) > most and sum(map(proportional_bytes, others())) > most:
        return "memory"
    folders = [posix.statvfs(folder) for folder in WRITABLE]
    return "disk" if any(folder.f_files - folder.f_ffree > FILES for folder in folders) else ""


def others() -> list[str]:
    """Returns the numbers of all other processes of the sandbox."""
    return [name for name in posix.listdir("/proc") if name.isdigit() and name != "1"]


def text_of_process(process: str, file: str) -> str:
    """Reads a file of a process; empty when the process has ended, or does not let others read it."""
    try:
        with open(f"/proc/{process}/{file}", errors="replace") as opened:  # A program gives itself any name.
            return opened.read()
    except OSError:
        return ""


def resident_bytes(process: str) -> int:
    """Returns the memory of a process without files, with its page tables; what it shares with others counts in
    full."""
    return kilobytes(status(process), ("RssAnon:", "RssShmem:", "VmPTE:")) * 1024


def proportional_bytes(process: str) -> int:
    """Returns the memory of a process, where what several share counts once; it takes the kernel a while."""
    text = text_of_process(process, "smaps_rollup")
    if not text:
        return resident_bytes(process)
    return (kilobytes(text, ("Pss_Anon:", "Pss_Shmem:")) + kilobytes(status(process), ("VmPTE:",))) * 1024


def status(process: str) -> str:
    """Returns the status of a process; of another thread where the first has ended, which has no memory any more."""
    text = text_of_process(process, "status")
    if "RssAnon:" in text:
        return text
    try:
        threads = posix.listdir(f"/proc/{process}/task")
    except OSError:
        threads = []
    texts = (text_of_process(process, f"task/{thread}/status") for thread in threads)
    return next((each for each in texts if "RssAnon:" in each), text)


def sockets() -> int:
    """Returns how many sockets the processes have open; as many as a process may have where it does not say."""
    found = set()
    for process in others():
        try:
            for number in posix.listdir(f"/proc/{process}/fd"):
                found.add(posix.readlink(f"/proc/{process}/fd/{number}"))
        except FileNotFoundError:
            continue
        except OSError:
            found.update(f"socket:{process}/{number}" for number in range(OPEN_FILES))
    return sum(each.startswith("socket:") for each in found)


def kilobytes(text: str, names: tuple[str, ...]) -> int:
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(names))


def collect(child: int) -> tuple[int, float, int, bool]:
    """Kills and collects all processes of the case. Returns the wait status of the child, CPU seconds, the largest
    resident memory of a process, and whether the case left processes or files."""
    cpu_seconds = 0.0
    memory = 0
    left = CONTAINED and others() not in ([], [str(child)])
    kill_all(child)
    _, status, usage = posix.wait4(child, 0)
    while True:
        cpu_seconds += usage.ru_utime + usage.ru_stime
        memory = max(memory, usage.ru_maxrss * 1024)
        try:
            _, _, usage = posix.wait4(-1, 0)
        except ChildProcessError:
            break
    left = left or (CONTAINED and not all(map(is_empty, WRITABLE)))
    return status, cpu_seconds, memory, left


def is_empty(folder: str) -> bool:
    """Returns whether nothing was left in a folder; not of one that a program has closed to others."""
    try:
        return FOUND.issuperset(posix.listdir(folder))
    except OSError:
        return False


def kill_all(child: int) -> None:
    """Kills every process of the case. One that has ended keeps its status until it is collected."""
    try:
        if CONTAINED:
            posix.kill(-1, SIGKILL)
        else:
            posix.killpg(child, SIGKILL)
    except ProcessLookupError:
        pass  # A child of no sandbox that did not yet begin a session.


def begin(case: Case, files: list[int], note: int) -> None:
    """Runs the case in this process and ends it."""
    posix.setsid()
    for number, file in enumerate(files[:3]):
        posix.dup2(file, number)
        posix.close(file)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    allow_reading_memory(True)
    if case["kind"] != "package_server":
        posix.nice(NICE)
    limit(case)
    try:
        RUNS[case["kind"]](case, files, note)
        end(0)
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")
        end(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException as error:  # The user's program: its errors are how it ended.
        posix.write(note, f"{named_limit(error)}\n{describe(error)}".encode(errors="replace")[:NOTE])
        error.__traceback__ = frames_of_program(error)
        sys.excepthook(type(error), error, error.__traceback__)
        end(1)


def end(status: int) -> None:
    """Ends this process as Python ends: threads and exit functions first. Taking the interpreter apart takes longer
    than many programs run, and is left out."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:  # The user's program: streams and exit functions may be anything.
        status = status or 1
        posix.write(2, f"{describe(error)}\n".encode(errors="replace"))
    finally:
        posix._exit(status & 0xFF)


def limit(case: Case) -> None:
    """Sets the limits of this process and of those that it starts."""
    limits = {
        resource.RLIMIT_AS: case["memory_bytes"],
        resource.RLIMIT_FSIZE: case["disk_bytes"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 1,  # With 0 a core handler that is a program runs all the same, outside.
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: case["processes"],
    }
    if CONTAINED:
        limits[resource.RLIMIT_NPROC] = case["processes"] + 1  # Otherwise other processes of the user would count.
    for which, most in limits.items():
        resource.setrlimit(which, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (case["cpu_seconds"], case["cpu_seconds"] + 1))


def named_limit(error: BaseException) -> str:
    """Returns the limit that made the error, or "-"."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, RuntimeError) and "start new thread" in describe(error):
        return "processes"
    number = error.errno if isinstance(error, OSError) else None
    return {ENOSPC: "disk", EFBIG: "disk", EAGAIN: "processes", ENOMEM: "memory"}.get(number or 0, "-")


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {message_of(error)}"


def message_of(error: BaseException) -> str:
    """Returns the text of an error, whatever its class does when asked."""
    try:
        return str(error)
    except BaseException:  # The user's class may raise anything.
        return "an error without a text"


def frames_of_program(error: BaseException) -> Any:
    """Returns the traceback without the frames before those of the program."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != "program.py":
        frames = frames.tb_next
    return frames


def namespace_of(name: str) -> dict[str, Any]:
    """Makes the module of the program, with the names that an interactive Python has."""
    module = type(sys)(name)
    sys.modules[name] = module
    module.__dict__.update(__builtins__=builtins, __file__="program.py")
    for word in ("exit", "quit"):
        builtins.__dict__.setdefault(word, sys.exit)
    sys.argv[:] = ["program.py"]
    return module.__dict__


def run_script(case: Case, files: list[int], note: int) -> None:
    """Runs a Python program like `python program.py`."""
    namespace = namespace_of("__main__")
    exec(compile(case["source"], "program.py", "exec"), namespace)


def run_command(case: Case, files: list[int], note: int) -> None:
    """Writes the source to a file and becomes the command."""
    import os
    import signal

    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them.
    with open(case["file"], "w") as file:
        file.write(case["source"])
    words = [word.replace("{file}", case["file"]) for word in case["command"]]
    os.execvp(words[0], words)


def run_part(case: Case, files: list[int], note: int) -> None:
    """Runs the code of another file of this folder."""
    part_of(case["kind"])["run"](case, files[3], note)


def part_of(name: str) -> dict[str, Any]:
    """Returns the names of another file of this folder, which is loaded once: in the first process, for all cases."""
    if name not in LOADED:
        LOADED[name] = {"__name__": name}
        exec(marshal.loads(PARTS[name]), LOADED[name])
    return LOADED[name]


RUNS = {
    "script": run_script,
    "command": run_command,
    "program_server": run_part,
    "examiner": run_part,
    "package_server": run_part,
}
