"""When this machine runs out of what a run needs: said in one line, and beforehand where it can be known."""

import errno
import resource

from asyncrl.errors import ConfigError, RemoteError, system_error_in

OWN_DESCRIPTORS, WORKERS_DESCRIPTORS = 64, 24
"""Files, sockets and pipes that a process of a fleet may have open: its own, and for each worker links, a pipe, a
process handle and mapped rows. With fewer, libzmq aborts the process or waits for ever."""

CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file has reached the size that this user may write (ulimit -f)",
    errno.EMFILE: "a process has as many files open as it may (ulimit -n)",
    errno.ENFILE: "this machine has as many files open as it can",
    errno.ENOMEM: "there is not enough memory",
}


def exhausted(error: Exception) -> str | None:
    """What ran out, when that is why this error came; also in a worker, whose errors arrive as texts, and some of them
    are those of libraries."""
    number = None
    if isinstance(error, RemoteError):
        number = system_error_in(error.message)
    elif isinstance(error, OSError):
        number = error.errno
    return f"{CAUSES[number]}: {error}" if number in CAUSES else None


def allow_descriptors(workers: int) -> None:
    """Let this process and its children open as many files as a fleet of so many workers needs.

    Raises:
        ConfigError: this user may not.
    """
    needed = OWN_DESCRIPTORS + WORKERS_DESCRIPTORS * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"a fleet of {workers} workers needs up to {needed} file descriptors a process, and this user may have "
            f"{hard}: raise the limit, `ulimit -n {needed}` or in /etc/security/limits.conf, or use fewer replicas"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
