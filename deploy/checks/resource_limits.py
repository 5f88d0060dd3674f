"""Limits of this machine: open files before a run starts, and the reason when a run exhausts a resource."""

import errno
import resource
from collections.abc import Iterator

from asyncrl.config.problems import Problem
from asyncrl.errors import RemoteError, errno_in

OWN_DESCRIPTORS, WORKERS_DESCRIPTORS = 64, 24
"""Descriptors that a process of a fleet may have open: its own, and for each worker connections, a pipe, a process
handle and mapped rows. With fewer, libzmq aborts the process or never returns."""

CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file has reached the size that this user may write (ulimit -f)",
    errno.EMFILE: "a process has as many files open as it may (ulimit -n)",
    errno.ENFILE: "this machine has as many files open as it can",
    errno.ENOMEM: "there is not enough memory",
}


def exhausted(error: Exception) -> str | None:
    """Returns which resource ran out if that caused the error, else None.

    Errors of workers, some of them errors of libraries, arrive as texts, which are searched.
    """
    number = errno_in(error.message) if isinstance(error, RemoteError) else getattr(error, "errno", None)
    return f"{CAUSES[number]}: {error}" if number in CAUSES else None


def descriptor_problems(workers: int) -> Iterator[Problem]:
    """Yields a problem when this user may not open as many files as a fleet of so many workers needs."""
    needed = OWN_DESCRIPTORS + WORKERS_DESCRIPTORS * workers
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        text = (
            f"a fleet of {workers} workers needs up to {needed} file descriptors a process, and this user may have "
            f"{hard}: raise the limit, `ulimit -n {needed}` or in /etc/security/limits.conf, or use fewer replicas"
        )
        yield Problem("", "", text)


def allow_descriptors(workers: int) -> None:
    """Lets this process and its children open as many files as a fleet of so many workers needs, within the limit."""
    needed = OWN_DESCRIPTORS + WORKERS_DESCRIPTORS * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
