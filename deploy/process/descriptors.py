"""Limits of the files that the processes of a fleet may have open."""

import resource

OWN_DESCRIPTORS = 64
WORKERS_DESCRIPTORS = 24
"""Descriptors that a process of a fleet may have open: its own, and for each worker connections, a pipe, a process
handle and mapped rows. With fewer, libzmq aborts the process or never returns."""

LARGE_FLEET = 1000
"""Workers for which a process that joins a fleet of unknown size is made ready, where its user may."""


def needed_descriptors(workers: int) -> int:
    """Returns how many a process of a fleet of so many workers needs."""
    return OWN_DESCRIPTORS + WORKERS_DESCRIPTORS * workers


def allow_descriptors(workers: int) -> None:
    """Lets this process and its children open as many files as a fleet of so many workers needs, within the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = needed_descriptors(workers)
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
