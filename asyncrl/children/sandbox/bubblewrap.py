"""Builds the command that starts a sandbox with Debian's bubblewrap, and tries whether it works on this machine."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

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
DEVICES = ("null", "zero", "random", "urandom")
STREAMS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
SYSTEM = (
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/sbin", "/sbin"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--tmpfs", "/dev"),
    *(word for name in DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
    *(word for name in STREAMS for word in ("--symlink", f"/proc/self/fd{STREAMS[name]}", f"/dev/{name}")),
    *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
)
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
"""All variables that a program has, with PWD."""


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


def sandbox_command(disk_bytes: int, seccomp: int) -> list[str]:
    """Returns the words before the command that runs inside. disk_bytes: size of each folder that it may write.
    seccomp: descriptor of a file with the filter."""
    bubblewrap, size = bubblewrap_path(), str(disk_bytes)
    writable = ["--size", size, "--perms", "1777", "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/dev/shm"]
    return [
        *_as_another_user(),
        *(bubblewrap, *PLAIN, "--uid", str(INNER_USER), "--gid", str(INNER_USER), "--hostname", "sandbox"),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"),
        *(*SYSTEM, *writable, "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", "/tmp", "--seccomp", str(seccomp), "--"),
    ]


def _as_another_user() -> list[str]:
    """Returns the beginning of a command that gives up root; nothing for an ordinary user."""
    if os.geteuid() != 0:
        return []
    if not _is_user(OUTER_USER, Path("/proc/self/uid_map").read_text()):
        raise SandboxError(
            "a child that contains code of yours starts no sandboxes where the fleet is root: run the fleet as another "
            'user, use the templates of rewards for programs, or write sandbox = "none" in the section [children]'
        )
    user = str(OUTER_USER)
    return [setpriv_path(), f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all", "--"]


def _is_user(user: int, ranges: str) -> bool:
    """Returns whether these ranges of users, as in /proc/self/uid_map, have one."""
    firsts = ((int(first), int(count)) for first, _, count in map(str.split, ranges.splitlines()))
    return any(first <= user < first + count for first, count in firsts)


@cache
def _filter() -> bytes:
    return seccomp_filter()


def filter_file() -> int:
    """Returns a new descriptor of a file in memory with the filter of system calls, to be read once."""
    file = os.memfd_create("seccomp")
    os.write(file, _filter())
    os.lseek(file, 0, os.SEEK_SET)
    return file


def try_sandbox() -> None:
    """Starts a sandbox that ends at once; raises SandboxError with the reason if it cannot."""
    python, filtered = python_for_programs(), filter_file()
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
