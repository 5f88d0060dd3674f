"""Checks what this machine offers.

Imports only the standard library, so that it works where a part of the installation is broken.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncrl.config.install_hints import install_extra, pip_install

Status = Literal["ok", "bad", "note"]

SHARED_MEMORY = Path("/dev/shm")
CONTAINER = Path("/sys/fs/cgroup")
IMPORT_DEADLINE = 120.0
"""Seconds: a first import of torch from a cold disk takes up to a minute."""
SOCKET_NAME_LIMIT = 107
"""Bytes of a Unix socket's path (sun_path, unix(7))."""
SOCKET_NAME_ROOM = 60
"""Bytes that the folder of sockets and an instance's name add to the path of the temporary folder."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `asyncrl doctor`.

    status: "bad" needs repair, "note" is worth knowing. remedy: what to do about it.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = {"ok": "ok  ", "bad": "BAD ", "note": "note"}[self.status]
        line = f"{mark}  {self.name:<20}{self.found}"
        return f"{line}\n{'':26}-> {self.remedy}" if self.remedy else line


def check(name: str, good: bool, found: str, remedy: str) -> Check:
    return Check(name, "ok", found) if good else Check(name, "bad", found, remedy)


def machine_checks() -> Iterator[Check]:
    """Checks everything that does not depend on an experiment; slow checks come last."""
    yield python_check()
    yield links_check(Path(__file__).parents[2])
    yield cores_check()
    yield Check("memory", "ok", f"{gigabytes(available_memory())} available")
    yield shared_memory_check()
    yield sockets_check(tempfile.gettempdir())
    yield from base_checks()
    yield torch_check()
    yield from extra_checks()


def python_check() -> Check:
    found = f"{sys.version.split()[0]} ({sys.executable})"
    return check("python", sys.version_info >= (3, 11), found, "asyncrl needs Python 3.11 or newer")


def links_check(package: Path) -> Check:
    """Checks that the folders beside the package are linked into it (in a checkout), or lie in it (in a wheel)."""
    broken = [name for name in ("services", "protocols", "deploy", "bench") if not (package / name).is_dir()]
    kind = "a checkout" if (package / "protocols").is_symlink() else "an installed package"
    found = f"{package}: " + (f"{', '.join(broken)} not mounted" if broken else kind)
    return check("package", not broken, found, "clone again with: git clone -c core.symlinks=true URL")


def cores_check() -> Check:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    set_here = f"; OMP_NUM_THREADS={threads} here, workers use fleet.threads" if threads else ""
    found = f"{usable_cores():g} usable of {os.cpu_count()}{set_here}"
    remedy = "workers share one core: it works, but generation and training will not overlap"
    return Check("cores", "ok", found) if usable_cores() >= 2 else Check("cores", "note", found, remedy)


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
    """Returns the bytes of memory that are available, by the kernel's count and the container's limit.

    Cached files count as available, because the kernel gives them up.
    """
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    available = int(found[1]) * 1024 if found else 0
    limit, used = CONTAINER / "memory.max", CONTAINER / "memory.current"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        kept = re.findall(r"^(?:in)?active_file (\d+)$", (CONTAINER / "memory.stat").read_text(), re.MULTILINE)
        available = min(available, int(text) - int(used.read_text()) + sum(map(int, kept)))
    return available


def shared_memory_check(need: int | None = None, folder: Path = SHARED_MEMORY) -> Check:
    """Checks that shared memory exists and has room for `need` bytes."""
    if not folder.is_dir():
        remedy = "mount a tmpfs there; without it rows travel as frames and weights cannot be shared"
        return Check(str(folder), "bad", "is not there", remedy)
    state = os.statvfs(folder)
    free, size = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    found = f"{gigabytes(free)} free of {gigabytes(size)}"
    if need is None:
        return Check(str(folder), "ok", found)
    more = "give it more (docker: --shm-size, compose: shm_size), or lower generation.slots or max_prompt_tokens"
    return check(str(folder), free >= need, f"{found}, about {gigabytes(need)} needed", more)


def sockets_check(folder: str) -> Check:
    room = SOCKET_NAME_LIMIT - SOCKET_NAME_ROOM - len(os.fsencode(folder))
    remedy = "set TMPDIR to a shorter path, for instance /tmp: names of sockets are limited to 107 bytes"
    return check("sockets", room >= 0 and os.access(folder, os.W_OK), f"in {folder}", remedy)


def base_checks() -> Iterator[Check]:
    """Checks that each package that asyncrl always needs is installed."""
    if installed("asyncrl") is None:
        remedy = f"{pip_install('-e', '.')} in the checkout, or scripts/set-up"
        yield Check("asyncrl", "bad", "runs from its folder and was never installed", remedy)
    for name in required():
        version = installed(name)
        yield check(name, version is not None, version or "is not installed", pip_install(name))


def torch_check() -> Check:
    """Imports and uses torch in a child process, because a broken torch may end the process that imports it."""
    program = (
        "import torch; torch.ones(2, 2) @ torch.ones(2, 2); "
        "print(torch.__version__, f'{torch.get_num_threads()} threads,', "
        "', '.join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or 'no GPU')"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=IMPORT_DEADLINE, check=False
        )
    except subprocess.TimeoutExpired:
        return Check("import torch", "bad", f"took over {IMPORT_DEADLINE:.0f} s", "look at the disk it lies on")
    last = done.stderr.strip().rpartition("\n")[2]
    failed = f"fails: {last or f'exit code {done.returncode}'}"
    found = done.stdout.strip() if done.returncode == 0 else failed
    return check("import torch", done.returncode == 0, found, pip_install("--force-reinstall", "torch"))


def device_checks(devices: Mapping[str, str]) -> Iterator[Check]:
    """Checks in a child process that torch can compute on each device. devices: by config key."""
    asked = [f"{key}={device}" for key, device in devices.items() if device != "cpu"]
    if not asked:
        return
    command = [sys.executable, "-m", "asyncrl.engines.devices", *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_DEADLINE, check=False)
    mistakes = (
        done.stdout.splitlines() if done.returncode == 0 else ["the devices cannot be tried, because torch fails"]
    )
    for mistake in mistakes:
        yield Check("devices", "bad", mistake, "correct it, then ask again")
    if not mistakes:
        yield Check("devices", "ok", ", ".join(asked))


def extra_checks() -> Iterator[Check]:
    """Checks which optional packages are installed; no experiment needs all of them."""
    for extra, packages in extras().items():
        missing = [name for name in packages if installed(name) is None]
        if missing:
            yield Check(f"[{extra}]", "note", f"without {', '.join(missing)}", install_extra(extra))
        else:
            yield Check(f"[{extra}]", "ok", ", ".join(f"{name} {installed(name)}" for name in packages))


def required() -> list[str]:
    return [name for name, extra in _requirements() if not extra]


def extras() -> dict[str, list[str]]:
    """Returns the packages of each extra, except of the extra for developing asyncrl."""
    found: dict[str, list[str]] = {}
    for name, extra in _requirements():
        if extra not in ("", "dev"):
            found.setdefault(extra, []).append(name)
    return found


def _requirements() -> Iterator[tuple[str, str]]:
    """Yields (package, extra or "") from the metadata of the installation."""
    if installed("asyncrl") is None:
        return
    for line in importlib.metadata.requires("asyncrl") or []:
        extra = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", line)
        yield _name(line), extra[1] if extra else ""


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return found[0]


def installed(name: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def gigabytes(size: float) -> str:
    return f"{size / 2**30:.2f} GB"
