"""Trains one candidate with one seed up to a step, in a process that stops there with a checkpoint and may go on.

The run always has the steps of the whole experiment, so that a learning rate that depends on them is the same in short
runs.
"""

import asyncio
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.sources import load
from asyncrl.errors import Interrupted
from asyncrl.telemetry.metrics_file import read_metrics
from asyncrl.telemetry.samples_file import SampleRecord
from asyncrl.telemetry.screen.display import LineDisplay, Metrics

ONE_TRIAL = "--one-trial"
"""`asyncrl tune --one-trial JSON` is the process of a trial. JSON: the fields of CandidateRun."""
QUIET = {"ASYNCRL_TELEMETRY__REPORT": "false", "ASYNCRL_TELEMETRY__TRACE": "false"}
"""Keys of every trial, unless flags set them: one report shows the whole search."""
MISTAKE = 2
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class CandidateRun:
    """One run of a search. flags: keys as typed; values: keys over them. last_step: where this run stops."""

    experiment: str
    run_dir: str
    last_step: int
    flags: Sequence[str]
    values: dict[str, Any]

    @property
    def is_trained(self) -> bool:
        path = Path(self.run_dir, "metrics.jsonl")
        lines = read_metrics(path) if path.exists() else []
        return bool(lines) and int(lines[-1]["step"]) >= self.last_step

    @property
    def output(self) -> Path:
        """Returns the file with what the run printed."""
        return Path(f"{self.run_dir}.log")


def run_trial(request: CandidateRun) -> str:
    """Trains up to the last step; returns "", or why it could not be trained. A run that fails without a mistake in its
    config goes on once. Raises Interrupted when a signal came, which ends the run with a checkpoint."""
    for _ in range(2):
        if request.is_trained or _run_once(request) == MISTAKE:
            break
    if request.is_trained:
        return ""
    lines = request.output.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("asyncrl: ") if lines else f"see {request.output}"


def _run_once(request: CandidateRun) -> int:
    """Returns the exit code. The run is no part of our terminal, and gets each signal from us. It begins when that of a
    search that was killed has ended: the kernel tells it, and it ends with a checkpoint."""
    run_dir = Path(request.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / "run.lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    command = [sys.executable, "-m", "asyncrl.deploy.cli", "tune", ONE_TRIAL, json.dumps(asdict(request))]
    received: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        child.terminate()

    with request.output.open("ab") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**QUIET, **os.environ}, start_new_session=True
        )
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise Interrupted("the search was interrupted")
    return code


class StoppingDisplay(LineDisplay):
    """Prints one line a step, and ends the run in order once a step is trained."""

    def __init__(self, steps: int, last_step: int) -> None:
        super().__init__(sys.stdout, steps)
        self._last_step = last_step
        self._is_ending = False

    def step(self, metrics: Metrics, sample: SampleRecord | None) -> None:
        super().step(metrics, sample)
        if int(metrics["version"]) >= self._last_step and not self._is_ending:
            self._is_ending = True
            os.kill(os.getpid(), signal.SIGTERM)


def train_here(argument: str) -> int:
    """Is the process of a trial, which ends when the search is killed."""
    from asyncrl.deploy.run_setup import RunRequest, run

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    request = CandidateRun(**json.loads(argument))
    config, run_dir = load(request.experiment, request.flags, values=request.values).config, Path(request.run_dir)
    display = StoppingDisplay(config.steps, request.last_step)
    again = "`asyncrl tune --to` with the directory of the search"
    asyncio.run(run(RunRequest(config, run_dir, display, again)))
    return 0
