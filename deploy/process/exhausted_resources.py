"""Finds which resource of the machine ran out, from the error that it caused."""

import errno

from asyncrl.errors import RemoteError, errno_in

CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file has reached the size that this user may write (ulimit -f)",
    errno.EMFILE: "a process has as many files open as it may (ulimit -n)",
    errno.ENFILE: "this machine has as many files open as it can",
    errno.ENOMEM: "there is not enough memory",
}
"""Resources that run out, by error number."""


def exhausted(error: Exception) -> str | None:
    """Returns which resource ran out if that caused the error, else None. Errors of workers arrive as texts."""
    number = errno_in(error.message) if isinstance(error, RemoteError) else getattr(error, "errno", None)
    return f"{CAUSES[number]}: {error}" if number in CAUSES else None
