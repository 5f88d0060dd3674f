"""Builds the command that starts a sandbox with Debian's bubblewrap, and tries whether it works on this machine."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from asyncrl.children.sandbox.memory_groups import JOINED
from asyncrl.children.sandbox.program_requests import SandboxError
from asyncrl.children.sandbox.seccomp import seccomp_filter

OUTER_USER = 61184
"""User that sandboxes of a fleet run as root belong to outside: the first that systemd gives to services that own no
file. The kernel exempts root from the limit of processes."""
INNER_USER = 65534
TRIAL_TIMEOUT = 20.0
"""Seconds for a sandbox that only ends; one takes 15 milliseconds."""
INSTALL_HINT = "install it with `apt-get install bubblewrap`"
UNCONFINED = 'use SandboxPool(kind="none"), which contains nothing'

PLAIN = ("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup")
DEVICES = ("zero", "null", "random", "urandom")
"""The first one, shared, is memory that no process has: it is there where the kernel limits all memory."""
OF_MACHINE = (
    "cmdline",
    "keys",
    "key-users",
    "locks",
    "modules",
    "partitions",
    "diskstats",
    "sys/kernel/random/boot_id",
)
"""Files of /proc about the machine: how it was started, what it is, who holds what there. They cannot be opened."""
PROC = (
    *("--proc", "/proc", "--remount-ro", "/proc"),
    *(
        word
        for name in OF_MACHINE
        if os.path.exists(f"/proc/{name}")
        for word in ("--ro-bind", os.devnull, f"/proc/{name}")
    ),
)
STREAMS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
SYSTEM = (
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/sbin", "/sbin"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", *PROC, "--tmpfs", "/dev"),
    *(word for name in STREAMS for word in ("--symlink", f"/proc/self/fd{STREAMS[name]}", f"/dev/{name}")),
    *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
)
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
"""All variables that a program has, with PWD."""


ENTRY = f'echo 1000 >/proc/self/oom_score_adj; [ -z "$0" ] || {JOINED} || exit 1; exec "$@"'
"""Shell command that becomes a sandbox: it has the kernel end its processes first where memory runs out, which none of
them can take back where /proc is read-only, and enters its cgroup."""


def python_for_programs() -> str:
    """Returns the interpreter of programs: that of this process if it lies below /usr, else Debian's."""
    own = os.path.realpath(sys.executable)
    for candidate in (own, "/usr/bin/python3"):
        if candidate.startswith("/usr/") and os.access(candidate, os.X_OK):
            return candidate
    raise SandboxError("no Python below /usr, the only folder that a sandbox sees; run `apt-get install python3`")


def bubblewrap_path(what: str = "programs", otherwise: str = UNCONFINED) -> str:
    """Returns the path of bwrap; raises SandboxError where it is not installed. what: it is to contain. otherwise: what
    the user can do without it."""
    if (found := shutil.which("bwrap")) is None:
        raise SandboxError(f"bubblewrap is not installed, which contains {what}; {INSTALL_HINT}, or {otherwise}")
    return found


def setpriv_path() -> str:
    """Returns the path of setpriv, which gives up root; raises SandboxError where it is not installed."""
    if (found := shutil.which("setpriv")) is None:
        raise SandboxError("setpriv is not installed, with which root starts sandboxes; `apt-get install util-linux`")
    return found


def sandbox_command(disk_bytes: int, seccomp: int, folders: Sequence[str] = (), group: str = "") -> list[str]:
    """Returns the words before the command that runs inside. disk_bytes: size of each folder that it may write.
    seccomp: descriptor of a file with the filter. folders: that it sees beside /usr. group: file of its cgroup."""
    bubblewrap = bubblewrap_path()
    size = str(disk_bytes)
    writable = ["--size", size, "--perms", "1777", "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/dev/shm"]
    return [
        *("/bin/sh", "-c", ENTRY, group),
        *_as_another_user(folders),
        *(bubblewrap, *PLAIN, "--uid", str(INNER_USER), "--gid", str(INNER_USER), "--hostname", "sandbox"),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"),
        *(*SYSTEM, *(word for name in (DEVICES if group else DEVICES[1:]) for word in _device(name))),
        *(*writable, *(word for folder in folders for word in ("--ro-bind", folder, folder))),
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", "/tmp", "--seccomp", str(seccomp), "--"),
    ]


def _device(name: str) -> tuple[str, str, str]:
    return "--dev-bind", f"/dev/{name}", f"/dev/{name}"


def _as_another_user(folders: Sequence[str]) -> list[str]:
    """Returns the beginning of a command that gives up root; nothing for an ordinary user, and where another one cannot
    read the folders, such as those below /root. There, root is nobody inside, without a capability."""
    if os.geteuid() != 0 or not all(map(_is_public, folders)):
        return []
    if not _is_user(OUTER_USER, Path("/proc/self/uid_map").read_text()):
        raise SandboxError(
            "a child that contains code of yours starts no sandboxes where the fleet is root: run the fleet as another "
            'user, use the templates of rewards for programs, or write sandbox = "none" in the section [children]'
        )
    user = str(OUTER_USER)
    return [setpriv_path(), f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all", "--"]


def _is_public(folder: str) -> bool:
    """Returns whether all users may enter a folder."""
    path = Path(folder).resolve()
    return all(each.stat().st_mode & stat.S_IXOTH for each in (path, *path.parents))


def _is_user(user: int, ranges: str) -> bool:
    """Returns whether these ranges of users, as in /proc/self/uid_map, have one."""
    firsts = ((int(first), int(count)) for first, _, count in map(str.split, ranges.splitlines()))
    return any(first <= user < first + count for first, count in firsts)


@cache
def _filter(is_limited: bool) -> bytes:
    return seccomp_filter(is_limited=is_limited)


def filter_file(*, is_limited: bool = True) -> int:
    """Returns a new descriptor of a file in memory with the filter of system calls, to be read once. is_limited: the
    kernel limits the memory of the sandbox."""
    file = os.memfd_create("seccomp")
    os.write(file, _filter(is_limited))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def try_sandbox() -> None:
    """Starts a sandbox that ends at once; raises SandboxError with the reason if it cannot."""
    python = python_for_programs()
    filtered = filter_file()
    try:
        run_trial([*sandbox_command(2**20, filtered), python, "-I", "-S", "-c", ""], ENVIRONMENT, UNCONFINED, filtered)
    finally:
        os.close(filtered)


def run_trial(command: Sequence[str], variables: Mapping[str, str], otherwise: str, *passed: int) -> None:
    """Runs a command with bubblewrap that ends at once; raises SandboxError with the reason if it cannot. passed:
    descriptors for it. otherwise: what the user can do without it."""
    try:
        done = subprocess.run(
            command,
            env=variables,
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TRIAL_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SandboxError(f"a sandbox that only ends did not end within {TRIAL_TIMEOUT:.0f} s") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"status {done.returncode}"
        raise SandboxError(
            f"bubblewrap cannot start a sandbox here: {reason}; allow user namespaces (in Docker: "
            f"security_opt seccomp=unconfined, systempaths=unconfined and apparmor=unconfined), or {otherwise}"
        )
