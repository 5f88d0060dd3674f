"""What ran out is recognised in whatever words it is told."""

import errno

import pytest

from asyncrl.deploy.checks.resource_limits import exhausted
from asyncrl.errors import ConfigError, RemoteError


def remote(message: str) -> RemoteError:
    return RemoteError("SafetensorError", message, "training", 0, "")


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full: [Errno 28] No space left on device"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk quota is used up: [Errno 122] Disk quota exceeded"),
        (
            remote("Error while serializing: I/O error: No space left on device (os error 28)"),
            "the disk is full: training[0] raised SafetensorError: Error while serializing",
        ),
        (remote("Disk quota exceeded (os error 122)"), "the disk quota is used up: training[0]"),
        (remote("[Errno 28] No space left on device: 'trainer.pt'"), "the disk is full: training[0]"),
    ],
)
def test_what_ran_out(error: Exception, what: str) -> None:
    assert (exhausted(error) or "").startswith(what)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, "no such file"), remote("[Errno 2] no such file"), remote("28"), ConfigError("no")]
)
def test_nothing_ran_out(error: Exception) -> None:
    assert exhausted(error) is None
