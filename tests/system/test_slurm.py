"""The batch script for Slurm, on network hosts in place of nodes: it trains, ends before its time is over, resumes."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit
from tests.network_hosts import HostProgram, NetworkHosts, network_hosts, why_no_hosts

sys.path.insert(0, str(Path(__file__).parent))
from watching import PATIENCE, wait_until

pytestmark = [
    pytest.mark.kills,
    pytest.mark.fleet,
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "-"),
]

BATCH = Path(__file__).parents[2] / "deploy" / "slurm.sbatch"
SRUN = """\
#!/usr/bin/env bash
printf '%s\\n' "$@" >"$FOLDER/srun.new" && mv "$FOLDER/srun.new" "$FOLDER/srun.arguments"
exit "$(cat "$FOLDER/srun.ended")"
"""
"""Stands for Slurm's srun: hands its arguments to the test, which runs the command on hosts, and waits for the end."""


class Allocation:
    """Three hosts, of which the first runs the batch script."""

    def __init__(self, hosts: NetworkHosts, folder: Path, model: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.model = model
        (folder / "bin").mkdir()
        (folder / "bin" / "srun").write_text(SRUN)
        (folder / "bin" / "srun").chmod(0o755)
        (folder / "bin" / "asyncrl").write_text(f'#!/bin/sh\nexec {sys.executable} -m asyncrl.deploy.cli "$@"\n')
        (folder / "bin" / "asyncrl").chmod(0o755)

    @contextmanager
    def job(self, output: Path) -> Iterator[HostProgram]:
        """Submits the script; its nodes end with it."""
        arguments = self.folder / "srun.arguments"
        ended = self.folder / "srun.ended"
        arguments.unlink(missing_ok=True)
        ended.unlink(missing_ok=True)
        os.mkfifo(ended)
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        variables = {"SLURM_NNODES": "3", "FOLDER": str(self.folder), "PATH": path, "XDG_CACHE_HOME": str(self.folder)}
        flags = ["--model.name", str(self.model), "--evaluate.prompts=", "--steps", "5000"]
        batch = self.hosts.start(1, ["bash", str(BATCH), *flags], output, variables)
        wait_until(arguments.exists, output.read_text)
        options, command = _split(arguments.read_text().splitlines())
        assert options == ["--nodes=2", "--ntasks=2", "--relative=1", "--kill-on-bad-exit=0"]
        nodes = [self.hosts.start(number, command, output, variables) for number in (2, 3)]
        yield batch
        worst = max(node.wait(PATIENCE) for node in nodes)
        ended.write_text(f"{worst}\n")


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns the options of srun, and the command."""
    count = next(number for number, argument in enumerate(arguments) if not argument.startswith("-"))
    return arguments[:count], arguments[count:]


def steps(shown: Path) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+)/", shown.read_text(), re.MULTILINE)]


def test_a_job_ends_with_a_checkpoint_before_its_time_is_over_and_goes_on_when_submitted_again(
    quickstart_model: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first.out"
    second = tmp_path / "second.out"
    with network_hosts(tmp_path, 3) as hosts:
        allocation = Allocation(hosts, tmp_path, quickstart_model)
        with allocation.job(first) as batch:
            wait_until(lambda: len(steps(first)) >= 5, first.read_text)
            batch.send_signal(signal.SIGTERM)
        assert batch.wait(PATIENCE) == 0, first.read_text()
        with allocation.job(second) as batch:
            wait_until(lambda: len(steps(second)) >= 3, second.read_text)
            batch.send_signal(signal.SIGTERM)
        assert batch.wait(PATIENCE) == 0, second.read_text()
    assert steps(second)[0] == steps(first)[-1] + 1, second.read_text()
    assert audit(tmp_path / "run").ok


def test_one_node_is_refused_with_the_command_for_it(tmp_path: Path) -> None:
    with network_hosts(tmp_path, 1) as hosts:
        batch = hosts.start(1, ["bash", str(BATCH)], tmp_path / "out", {"SLURM_NNODES": "1"})
        assert batch.wait(PATIENCE) == 2
    assert "on one node run: asyncrl run quickstart" in (tmp_path / "out").read_text()
