"""NVIDIA's multi-process service (MPS), with which processes run on a GPU at once instead of in turns."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from asyncrl.bench.gpu.bench_device import NotMeasured

CONTROL = "nvidia-cuda-mps-control"
DEADLINE = 30.0
"""Seconds for a command to the service."""


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """Runs a service of its own for the programs that start with the yielded variables. Raises NotMeasured where it
    cannot be started, as in containers without the rights that it needs."""
    if shutil.which(CONTROL) is None:
        raise NotMeasured(f"{CONTROL} is not installed")
    with TemporaryDirectory() as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        started = _control(["-d"], "", variables)
        if started.returncode:
            raise NotMeasured(f"{CONTROL} did not start: {(started.stderr or started.stdout).strip()[-300:]}")
        try:
            yield variables
        finally:
            _control([], "quit\n", variables)


def _control(arguments: list[str], text: str, variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **variables}
    command = [CONTROL, *arguments]
    try:
        return subprocess.run(
            command, input=text, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
    except subprocess.TimeoutExpired as silent:
        raise NotMeasured(f"{CONTROL} did not answer in {DEADLINE:.0f} s") from silent
