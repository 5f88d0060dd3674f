"""Trains one case after the other in one process, so that torch and transformers are loaded once.

    parent ── a line of arguments for asyncrl.train ──> child ── "done" ──> parent

The output of the runs goes into a log file; a run that fails ends the process.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import asyncrl
from asyncrl.bench.child_process import environment


class RunFailed(Exception):
    """Reports that a run failed or exceeded its deadline; the message holds the end of its log."""


class TrainingChild:
    """Starts the process for the first run, and again after a failed run.

    log: the file for the output of the runs; its end is part of the message when a run fails.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def train(self, request: Mapping[str, Any], deadline: float) -> None:
        """Calls `asyncrl.train(**request)` in the child.

        Raises:
            RunFailed: the run failed, or did not end within `deadline` seconds.
        """
        process = self._process = self._process or self._start()
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        done, _, _ = select.select([process.stdout], [], [], deadline)
        if done and process.stdout.readline() == "done\n":
            return
        self._end()
        reason = "the run failed" if done else f"the run did not end within {deadline:.0f} s"
        raise RunFailed(f"{reason}: {self._log.read_text(errors='replace').strip()[-1500:]}")

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", __name__]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w") as log:
            return subprocess.Popen(
                command, env=environment(1), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._process = None


def _main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        asyncrl.train(**json.loads(line))
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    _main()
