"""Trains one candidate with one seed up to a step, and stops it there with a checkpoint, from which it may go on.

    python -m asyncrl.deploy.commands.tuning.trial_process JSON

is the process of a trial. JSON: the fields of CandidateRun. The run always has the steps of the whole experiment, so
that a learning rate that depends on them is the same in short runs.
"""

import asyncio
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config.sources import load
from asyncrl.deploy.run_setup import RunRequest, run
from asyncrl.errors import AsyncrlError, ConfigError, Interrupted
from asyncrl.telemetry.metrics_file import read_metrics
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.samples_file import SampleRecord
from asyncrl.telemetry.screen.display import LineDisplay, Metrics

QUIET = {"ASYNCRL_TELEMETRY__REPORT": "false", "ASYNCRL_TELEMETRY__TRACE": "false"}
"""Keys of every trial, unless flags set them: one report shows the whole search."""
MISTAKE, FAILURE = 2, 1
PR_SET_PDEATHSIG = 1
ORPHAN_DEADLINE, LOOK = 30.0, 0.2
"""Seconds that a run of a killed search may take to end, and between two looks at its lock."""


@dataclass(frozen=True, slots=True)
class CandidateRun:
    """One run of a search. flags: keys as typed; values: keys over them. last_step: where this run stops."""

    experiment: str
    run_dir: str
    last_step: int
    flags: Sequence[str] = ()
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(Path(self.run_dir).absolute())

    @property
    def steps_trained(self) -> int:
        lines = read_metrics(self.directory.metrics) if self.directory.metrics.exists() else []
        return int(lines[-1]["step"]) if lines else 0

    @property
    def output(self) -> Path:
        """Returns the file with what the run printed."""
        return Path(f"{self.run_dir}.log")


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


def run_trial(request: CandidateRun) -> str:
    """Trains in a process of its own until the last step is there; returns "", or why it could not be trained. A run
    that fails without a mistake in its config goes on once.

    Raises Interrupted when a signal came, which ends the run with a checkpoint.
    """
    for _ in range(2):
        code, failure = _run_once(request)
        if not failure or code == MISTAKE:
            break
    return failure


def _run_once(request: CandidateRun) -> tuple[int, str]:
    """Returns the exit code of a run, and why it has not trained the last step."""
    if request.steps_trained >= request.last_step:
        return 0, ""
    _wait_for_orphan(request.directory)
    request.output.parent.mkdir(parents=True, exist_ok=True)
    with request.output.open("ab") as output:
        command = [sys.executable, "-m", __name__, json.dumps(asdict(request))]
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**QUIET, **os.environ})
    code, is_interrupted = _waited(child)
    if is_interrupted:
        raise Interrupted("the search was interrupted")
    if code == 0 and request.steps_trained >= request.last_step:
        return 0, ""
    return code, _last_line(request.output)


def _wait_for_orphan(directory: RunDirectory) -> None:
    """Waits for a run whose search was killed: the kernel tells it, and it ends with a checkpoint."""
    if not directory.path.exists():
        return
    deadline = time.monotonic() + ORPHAN_DEADLINE
    with open(directory.path / "run.lock", "a+") as lock:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(LOOK)


def _waited(child: "subprocess.Popen[bytes]") -> tuple[int, bool]:
    """Waits for the end of a run; returns its exit code, and whether a signal came. A terminal sends Ctrl-C to both
    processes; other signals reach this one only, and are passed on."""
    received: list[int] = []

    def take(number: int, frame: object) -> None:
        received.append(number)
        if number != signal.SIGINT:
            child.send_signal(number)

    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return child.wait(), bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_line(output: Path) -> str:
    lines = output.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("asyncrl: ") if lines else f"see {output}"


def main(argument: str) -> int:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    request = CandidateRun(**json.loads(argument))
    try:
        config = load(request.experiment, request.flags, values=request.values).config
        display = StoppingDisplay(config.steps, request.last_step)
        asyncio.run(
            run(
                RunRequest(
                    config, Path(request.run_dir), display, "`asyncrl tune --to` with the directory of the search"
                )
            )
        )
    except ConfigError as error:
        print(f"asyncrl: {error}", flush=True)
        return MISTAKE
    except AsyncrlError as error:
        print(f"asyncrl: {error}", flush=True)
        return getattr(error, "exit_code", FAILURE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
