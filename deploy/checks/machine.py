"""Checks what this machine offers, and its packages. Imports only the standard library, to work where the installation
is broken."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncrl.children.sandbox.bubblewrap import bubblewrap_path, try_sandbox
from asyncrl.children.sandbox.memory_groups import home as memory_home
from asyncrl.children.sandbox.program_requests import SandboxError
from asyncrl.config.install_hints import install_extra, pip_install, pip_uninstall
from asyncrl.config.problems import Problem

Status = Literal["ok", "bad", "note"]

SHARED_MEMORY = Path("/dev/shm")
CONTAINER = Path("/sys/fs/cgroup")
FOR_DEVELOPERS = ("dev", "docs", "agents")
"""Extras for tests and documents, which no code of asyncrl imports."""
IMPORT_DEADLINE = 120.0
"""Seconds: a first import of torch from a cold disk takes up to a minute."""
SOCKET_NAME_LIMIT = 107
"""Bytes of a Unix socket's path (sun_path, unix(7))."""
SOCKET_NAME_ROOM = 60
"""Bytes that the folder of sockets and an instance's name add to the path of the temporary folder."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `asyncrl doctor`. status: "bad" needs repair, "note" is worth knowing. remedy: what to do then."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = {"ok": "ok  ", "bad": "BAD ", "note": "note"}[self.status]
        line = f"{mark}  {self.name:<19} {self.found}"
        return f"{line}\n{'':26}-> {self.remedy}" if self.remedy else line


def check(name: str, good: bool, found: str, remedy: str, otherwise: Status = "bad") -> Check:
    return Check(name, "ok", found) if good else Check(name, otherwise, found, remedy)


def machine_checks() -> Iterator[Check]:
    """Checks everything that does not depend on an experiment; slow checks come last."""
    python = f"{sys.version.split()[0]} ({sys.executable})"
    yield check("python", sys.version_info >= (3, 11), python, "install Python 3.11 or newer; asyncrl needs it")
    package = Path(__file__).parents[2]
    kind = "a checkout" if (package / "protocols").is_symlink() else "an installed package"
    yield Check("package", "ok", f"{package}: {kind}")
    yield cores_check()
    yield Check("memory", "ok", f"{size_text(available_memory())} available")
    yield shared_memory_check()
    yield sockets_check(tempfile.gettempdir())
    yield sandbox_check()
    yield from package_checks()
    yield torch_check()


def cores_check() -> Check:
    cores = usable_cores()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    set_here = f"; OMP_NUM_THREADS={threads} here, workers use fleet.threads" if threads else ""
    found = f"{cores:g} usable of {os.cpu_count()}{set_here}"
    remedy = "workers share one core: a run works, but generation and training will not overlap"
    return check("cores", cores >= 2, found, remedy, "note")


def usable_cores() -> float:
    """Returns the number of cores that this process may use, by its affinity and the quota of its container."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = CONTAINER / "cpu.max"
    if quota.is_file():
        limit, _, period = quota.read_text().partition(" ")
        if limit != "max":
            cores = min(cores, int(limit) / int(period))
    return cores


def available_memory() -> int:
    """Returns the bytes of memory that are available, cached files included, by kernel and container."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    available = int(found[1]) * 1024 if found else 0
    limit = CONTAINER / "memory.max"
    used = CONTAINER / "memory.current"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        kept = re.findall(r"^(?:in)?active_file (\d+)$", (CONTAINER / "memory.stat").read_text(), re.MULTILINE)
        available = min(available, int(text) - int(used.read_text()) + sum(map(int, kept)))
    return available


def shared_memory_check(folder: Path = SHARED_MEMORY) -> Check:
    """Checks that shared memory exists, and says how much of it is free."""
    if not folder.is_dir():
        remedy = "mount a tmpfs there; without it rows travel as frames and weights cannot be shared"
        return Check(str(folder), "bad", "is not there", remedy)
    state = os.statvfs(folder)
    size = state.f_blocks * state.f_frsize
    free = f"{size_text(free_shared_memory(folder))} free of {size_text(size)}"
    try:
        from asyncrl.lanes.shared_memory import abandoned_segments
    except ImportError:  # Another line says what is missing.
        return Check(str(folder), "ok", free)
    if left := abandoned_segments(folder):
        text = f"{free}; {size_text(sum(left.values()))} in {len(left)} files are of runs that were killed"
        return Check(str(folder), "note", text, "the next run on this machine removes them")
    return Check(str(folder), "ok", free)


def free_shared_memory(folder: Path = SHARED_MEMORY) -> int:
    """Returns the bytes of shared memory that nobody uses; 0 without any."""
    if not folder.is_dir():
        return 0
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def sockets_check(folder: str) -> Check:
    room = SOCKET_NAME_LIMIT - SOCKET_NAME_ROOM - len(os.fsencode(folder))
    remedy = "set TMPDIR to a shorter path, for instance /tmp: names of sockets are limited to 107 bytes"
    return check("sockets", room >= 0 and os.access(folder, os.W_OK), f"in {folder}", remedy)


def sandbox_check() -> Check:
    """Starts a sandbox for programs that a model writes, which most experiments do without."""
    try:
        try_sandbox()
    except SandboxError as error:
        return Check("sandbox", "note", str(error), "needed only where programs of the model are run")
    folder, why = memory_home()
    said = f"{bubblewrap_path()} contains programs"
    if folder is not None:
        return Check("sandbox", "ok", f"{said}; the kernel limits their memory, by cgroups in {folder}")
    remedy = "let the fleet make memory cgroups: run it as root, or by systemd-run --user --scope -p Delegate=yes"
    looks = "memory is looked at, and programs have no memory that looks do not show"
    return Check("sandbox", "note", f"{said}; no memory cgroup can be made ({why}): {looks}", remedy)


def package_checks() -> Iterator[Check]:
    """Checks the packages that asyncrl always needs, and names the extras that are there; what an experiment lacks is a
    problem of it."""
    if installed("asyncrl") is None:
        remedy = f"run {pip_install('-e', '.')} in the checkout, or scripts/set-up"
        yield Check("asyncrl", "bad", "runs from its folder and was never installed", remedy)
    extras = requirements()
    needed = {name: installed(name) for name in extras.pop("", ())}
    for name in (name for name, version in needed.items() if version is None):
        yield Check(name, "bad", "is not installed", f"run {pip_install(name)}")
    yield Check("packages", "ok", ", ".join(f"{name} {version}" for name, version in needed.items() if version))
    there = {extra: all(map(installed, packages)) for extra, packages in extras.items()}
    lacking = ", ".join(extra for extra in there if not there[extra])
    told = [", ".join(extra for extra in there if there[extra]) or "none"]
    told += [f"not installed {lacking}"] if lacking else []
    remedy = f"an experiment that needs one says so; by hand: {install_extra('NAME')}" if lacking else ""
    yield Check("extras", "ok", "; ".join(told), remedy)


def torch_check() -> Check:
    """Imports and uses torch in a child process, because a broken torch may end the process that imports it."""
    program = (
        "import torch; torch.ones(2, 2) @ torch.ones(2, 2); "
        "print(torch.__version__, f'{torch.get_num_threads()} threads,', "
        "', '.join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or 'no GPU')"
    )
    try:
        done = _run_python("-c", program)
    except subprocess.TimeoutExpired:
        return Check("import torch", "bad", f"took over {IMPORT_DEADLINE:.0f} s", "look at the disk it lies on")
    last = done.stderr.strip().rpartition("\n")[2]
    found = done.stdout.strip() if done.returncode == 0 else f"fails: {last or f'exit code {done.returncode}'}"
    remedy = f"run {pip_install('--force-reinstall', 'torch')}"
    return check("import torch", done.returncode == 0, found, remedy)


DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def device_mistakes(devices: Mapping[str, str]) -> list[Problem]:
    """Returns the devices that torch cannot compute on, which a child process tries. devices: by config key."""
    named = {key: device for key, device in devices.items() if not DEVICE.fullmatch(device)}
    if named:
        text = 'asyncrl computes on CPUs and on GPUs with CUDA: write "cpu", "cuda" or "cuda:0"'
        return [Problem(key, "", f'"{device}" cannot be used: {text}') for key, device in named.items()]
    asked = [f"{key}={device}" for key, device in devices.items() if device != "cpu"]
    if not asked:
        return []
    try:
        done = _run_python("-m", "asyncrl.engines.devices", *asked)
    except subprocess.TimeoutExpired:
        return [Problem("", "", f"devices cannot be tried: to import torch takes over {IMPORT_DEADLINE:.0f} s")]
    if done.returncode:
        return [Problem("", "", f"devices cannot be tried, because torch fails: {done.stderr.strip()[-200:]}")]
    mistakes = (line.partition(" = ") for line in done.stdout.splitlines())
    return [Problem(key, "", text) for key, _, text in mistakes]


def _run_python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_DEADLINE, check=False)


def requirements() -> dict[str, list[str]]:
    """Returns the packages of each extra that code of asyncrl uses; those of "" are always needed."""
    found: dict[str, list[str]] = {}
    listed = importlib.metadata.requires("asyncrl") if installed("asyncrl") else None
    for line in listed or []:
        name, _, condition = line.partition(";")
        extra = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", condition)
        found.setdefault(extra[1] if extra else "", []).extend(re.findall(r"^[\w.-]+", name))
    return {extra: packages for extra, packages in found.items() if extra not in FOR_DEVELOPERS}


def installed(name: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def size_text(size: float) -> str:
    """Formats bytes: 12345678 -> "11.8 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1024 or unit == "GB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"


# Checks the packages of the extras cu12 and cu13: an environment may have one of the two, as their wheels of NCCL
# write one file.


PAIRS = (("nvidia-nccl-cu12", "nvidia-nccl-cu13"), ("cupy-cuda12x", "cupy-cuda13x"))
"""Packages of the two extras that write the same files."""


def gpu_package_problems(
    devices: Mapping[str, str], version: Callable[[str], str | None] = installed
) -> Iterator[Problem]:
    """Yields a problem for each two packages that overwrite each other, a warning where no service is on a GPU.
    devices: by config key. version: of a distribution, None without one."""
    on_cpu = all(device == "cpu" for device in devices.values())
    for older, newer in PAIRS:
        if (first := version(older)) and (second := version(newer)):
            text = (
                f"{older} {first} and {newer} {second} are both installed and write the same files, so what was built "
                f"for one runs with the other: run {pip_uninstall(older, newer)}, then {install_extra('cu12')}, or for "
                f"a torch of CUDA 13 {install_extra('cu13')}"
            )
            yield Problem("", "", text, is_warning=on_cpu)
