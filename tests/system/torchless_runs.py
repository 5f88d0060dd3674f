"""Whole runs as processes, for tests that harm them: start, watch, kill, and look for what is left."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from programs import ForkedProgram
from watching import PATIENCE, pid_of, wait_until, workers_of

from asyncrl.controller.journal.audit import audit
from asyncrl.controller.journal.journal import Scan
from asyncrl.controller.journal.ledger import AttemptStarted, Scored, Trained
from asyncrl.controller.journal.run_storage import FileStore

HERE = Path(__file__).parent
EXPERIMENT = HERE / "torchless.toml"
MARK = "TESTED_RUN"
"""In the environment of every process of a tested run, also of those that its workers start."""


@dataclass(slots=True)
class Run:
    """One run directory and the command that works in it. standins: without torch. wrapper: a command that runs it.
    start: starts a process; it is Popen where there is a wrapper. started: how often."""

    directory: Path
    flags: Sequence[str] = ()
    experiment: str = str(EXPERIMENT)
    standins: bool = True
    wrapper: Sequence[str] = ()
    start: "type[subprocess.Popen[str]]" = ForkedProgram
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    started: int = 0

    @contextmanager
    def running(self, at: tuple[str, str, int] | None = None, slow: int = -1) -> Iterator["subprocess.Popen[str]"]:
        """Start it, or resume it; killed at the end if it still runs. at: see faulty_run.py. Output goes to a file."""
        self.started += 1
        faults: dict[str, Any] = {"standins": self.standins, "died": str(self.directory) + f".died{self.started}"}
        faults["secrets"] = str(self.directory) + ".secrets"
        if at:
            faults["at"] = at
        faults["slow"] = slow
        command = [*self.wrapper, sys.executable, str(HERE / "faulty_run.py"), "run", self.experiment]
        command += ["--run-dir", str(self.directory), *self.flags]
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "FAULTS": json.dumps(faults), MARK: self.mark}
        with self.output.open("a") as output:
            start = subprocess.Popen if self.wrapper else self.start
            process = start(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait(20)

    def to_its_end(self, at: tuple[str, str, int] | None = None) -> int:
        """Start or resume it; its exit code."""
        with self.running(at) as process:
            return process.wait(PATIENCE)

    def goes_on(self, steps: int) -> None:
        """Start or resume it, and end it by Ctrl-C so many steps later: it is in order, and nothing is left."""
        with self.running() as process:
            self.until_step(process, self.version + steps)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0, self.shown
        self.audited()
        self.leaves_nothing()

    # ---- looking -----------------------------------------------------------------------------------------

    @property
    def output(self) -> Path:
        return self.directory.with_name(self.directory.name + ".output")

    @property
    def shown(self) -> str:
        """Everything that was shown, by all starts."""
        return self.output.read_text()

    @property
    def secrets(self) -> list[str]:
        """The secret keys of all pairs that the controller has made so far."""
        return Path(str(self.directory) + ".secrets").read_text().splitlines()

    @property
    def version(self) -> int:
        """The last step that was shown."""
        steps = re.findall(r"^step (\d+)/", self.shown, re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def until_step(self, process: "subprocess.Popen[str]", step: int) -> None:
        wait_until(lambda: self.version >= step or process.poll() is not None, f"step {step}")
        assert process.poll() is None, f"ended early:\n{self.shown}"

    def pid_of(self, service: str) -> int:
        return pid_of(self.directory, service)

    def workers(self) -> list[tuple[str, int]]:
        """Service and pid of each."""
        return [(service, pid) for (service, _, _), pid in workers_of(self.directory).items()]

    def processes(self) -> list[int]:
        """All that live, found by their environment."""
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and self._ours(path)]

    def _ours(self, process: Path) -> bool:
        with suppress(OSError):
            return f"{MARK}={self.mark}".encode() in (process / "environ").read_bytes()
        return False

    def left(self) -> list[str]:
        """Processes, shared memory and socket folders of this run that still exist."""
        name = self.directory / "run.id"
        places = []
        if name.exists():
            folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
            places = [path for folder in folders for path in folder.glob(f"asyncrl-{name.read_text()}*")]
        return [*map(str, places), *(f"process {pid}" for pid in self.processes())]

    def leaves_nothing(self) -> None:
        wait_until(lambda: not self.left(), lambda: f"the end of {self.left()}", 10.0)

    def audited(self) -> None:
        report = audit(self.directory)
        assert report.ok, f"{report}\n{self.shown}"

    def trained(self) -> dict[int, list[tuple[int, int, float, float]]]:
        """By version: group, member, reward and advantage of each sample that was trained, as far as it counts."""
        store = FileStore(self.directory)
        rewards: dict[tuple[int, int], float] = {}
        trained = {}
        try:
            for framed in Scan(store).surviving():
                match framed.record:
                    case AttemptStarted(group=group, members=members):
                        for member in members:
                            rewards.pop((group, member), None)
                    case Scored(group=group, member=member, reward=reward):
                        rewards[group, member] = reward
                    case Trained(version=version, cuts=cuts, advantages=advantages):
                        keys = [(group, member) for group, members in cuts for member in members]
                        trained[version] = sorted(
                            (*key, rewards[key], advantage) for key, advantage in zip(keys, advantages, strict=True)
                        )
        finally:
            store.close()
        return trained
