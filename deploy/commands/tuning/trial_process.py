"""Trains one candidate with one seed up to a step, as `asyncrl run --stop-at` in a process of its own."""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.deploy.commands.tuning.search_space import Values, typed
from asyncrl.errors import Interrupted
from asyncrl.telemetry.jsonl import Object, read_metrics

QUIET = {"ASYNCRL_TELEMETRY__REPORT": "false", "ASYNCRL_TELEMETRY__TRACE": "false"}
"""Keys of every trial, unless flags set them: one report shows the whole search."""
MISTAKE = 2
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class CandidateRun:
    """One run of a search. flags: keys as typed; values: keys over them. last_step: where this run stops."""

    experiment: str
    run_dir: Path
    last_step: int
    flags: Sequence[str]
    values: Values

    @property
    def lines(self) -> list[Object]:
        """Returns the metrics of each step so far."""
        path = self.run_dir / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    @property
    def is_trained(self) -> bool:
        lines = self.lines
        return bool(lines) and int(lines[-1]["step"]) >= self.last_step

    @property
    def output(self) -> Path:
        """Returns the file with what the run printed."""
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    @property
    def command(self) -> list[str]:
        keys = [f"--{key}={typed(value)}" for key, value in self.values.items()]
        stop = ["--run-dir", str(self.run_dir), "--stop-at", str(self.last_step)]
        return [sys.executable, "-m", "asyncrl.deploy.cli", "run", self.experiment, *self.flags, *keys, *stop]


def run_trial(run: CandidateRun) -> str:
    """Trains up to the last step; returns "", or why it could not be trained. A run that fails without a mistake in its
    config goes on once. Raises Interrupted when a signal came, which ends the run with a checkpoint."""
    for _ in range(2):
        if run.is_trained or _run_once(run) == MISTAKE:
            break
    if run.is_trained:
        return ""
    lines = run.output.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("asyncrl: ") if lines else f"see {run.output}"


def _run_once(run: CandidateRun) -> int:
    """Returns the exit code. The run is no part of our terminal, and gets each signal from us. It begins when that of a
    search that was killed has ended: the kernel tells it, and it ends with a checkpoint."""
    run.run_dir.mkdir(parents=True, exist_ok=True)
    with open(run.run_dir / "run.lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    received: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        child.terminate()

    with run.output.open("ab") as output:
        child = subprocess.Popen(
            run.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**QUIET, **os.environ},
            start_new_session=True,
            preexec_fn=_end_with_parent,
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


def _end_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
