"""A process that trains one case after the other, so that torch and transformers are loaded once.

    parent ── a line of arguments for asyncrl.train ──> child ── "done" ──> parent

What the runs say, and what they fail of, goes into a file; a run that fails ends its process.
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
from asyncrl.bench.workloads import environment


class RunFailed(Exception):
    """A run ended otherwise than it should; the message is the end of what it said."""


class Child:
    """Starts the process when it is needed, and again after a run that failed.

    log: of what the runs say; the end of it is told when one fails.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def train(self, order: Mapping[str, Any], patience: float) -> None:
        """Call `asyncrl.train(**order)` there.

        Raises:
            RunFailed: it failed, or was not done within `patience` seconds.
        """
        process = self._process = self._process or self._started()
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        done, _, _ = select.select([process.stdout], [], [], patience)
        if done and process.stdout.readline() == "done\n":
            return
        self._end()
        why = "failed" if done else f"not done within {patience:.0f} s"
        raise RunFailed(f"{why}: {self._log.read_text(errors='replace').strip()[-1500:]}")

    def _started(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", __name__]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w") as said:
            return subprocess.Popen(
                command, env=environment(1), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
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
