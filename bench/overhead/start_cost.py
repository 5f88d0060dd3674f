"""Measures a start: the quickstart from its command to its first step, a killed worker until it takes calls again,
and the memory of four workers. Each with workers that are forked and with workers that are spawned, round by round.

    command ──> first step        wall clock, and CPU of all processes; the model was warmed up before
    SIGKILL ──> takes calls       of a generation worker beside three others
    import torch                  in a fresh Python: the yardstick of this machine, of which a start needs one at least
    memory                        proportional set sizes (PSS: a page that n processes share counts 1/n to each) and
                                  resident set sizes (RSS: it counts to each), with the processes to fork from
"""

import argparse
import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from asyncrl.bench.measurements import (
    MachineLoad,
    RoundValues,
    goal_line,
    in_turn,
    own_seconds,
    ratios,
    round_values,
    table,
)
from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.deploy.process.fork_client import forks_of
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.deploy.service_specs import service_specs
from asyncrl.engines.models.model_preparation import prepare
from asyncrl.fleet.fleet import RunningFleet, running_fleet
from asyncrl.fleet.lifecycle_events import FleetEvent, WorkerStarted
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.wire import Wakeup

Start = Literal["fork", "spawn"]

FIRST_STEP, FIRST_STEP_CPU, BACK, MEMORY = 5.0, 8.0, 1.0, 0.6
"""The goals: seconds, CPU-seconds, seconds, and a share of the memory of spawned workers."""
DEADLINE = 120.0
MEGABYTE = 2**20


@dataclass(frozen=True, slots=True)
class MeasuredFleet:
    """Seconds until a killed worker took calls again; bytes of four workers and what they were forked from."""

    back: float
    pss: float
    rss: float


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args(arguments)
    machine = MachineLoad()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        model = asyncio.run(prepare(load("quickstart").config, Path(folder) / "model", print))
        steps = in_turn({start: partial(first_step, start, model) for start in STARTS}, asked.rounds)
        torch = RoundValues(tuple(import_torch() for _ in range(asked.rounds)))
        fleets = in_turn({start: partial(one_fleet, start, model) for start in STARTS}, asked.rounds)
    print(f"quickstart, {asked.rounds} rounds in turn; median [least - most]")
    wall, cpu = (round_values({start: [each[at] for each in steps[start]] for start in STARTS}) for at in (0, 1))
    back, pss, rss = (
        round_values({start: [getattr(each, name) for each in fleets[start]] for start in STARTS})
        for name in ("back", "pss", "rss")
    )
    rows = [
        ("command to first step, s", wall),
        ("command to first step, CPU-s", cpu),
        ("killed worker takes calls again, s", back),
        ("four workers, PSS, MB", pss),
        ("four workers, RSS, MB", rss),
    ]
    share = wall["fork"].median / torch.median
    print(f"import torch in a fresh Python: {torch} s; command to first step, forked, takes {share:.1f} times that")
    print(table(["", *STARTS], [[name, *(str(found[start]) for start in STARTS)] for name, found in rows]))
    for line in verdicts(wall["fork"], cpu["fork"], back["fork"], ratios(pss["fork"], pss["spawn"])):
        print(line)
    print(machine)


STARTS: tuple[Start, ...] = ("fork", "spawn")


def verdicts(wall: RoundValues, cpu: RoundValues, back: RoundValues, memory: RoundValues) -> list[str]:
    return [
        goal_line("seconds from the command to the first step", wall.median, FIRST_STEP, at_most=True),
        goal_line("CPU-seconds from the command to the first step", cpu.median, FIRST_STEP_CPU, at_most=True),
        goal_line("seconds until a killed worker takes calls again", back.median, BACK, at_most=True),
        goal_line("memory (PSS) of four workers, forked over spawned", memory.median, MEMORY, at_most=True),
    ]


def first_step(start: Start, model: Path) -> tuple[float, float]:
    """Seconds and CPU-seconds of the quickstart until it shows its first step."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        program = [sys.executable, "-m", "asyncrl.deploy.cli", "run", "quickstart", "--run-dir", f"{folder}/run"]
        keys = ["--model.name", str(model), "--evaluate.every", "250", "--fleet.start", start]
        cpu = own_seconds()
        began = time.monotonic()
        run = subprocess.Popen([*program, *keys], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert run.stdout is not None
            assert any(re.match(r"step \d+/", line) for line in run.stdout), "it ended before its first step"
            return time.monotonic() - began, own_seconds() - cpu
        finally:
            run.kill()
            run.communicate(timeout=DEADLINE)


def import_torch() -> float:
    """Seconds that a fresh Python takes to import torch."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=DEADLINE)
    return time.monotonic() - began


# ---- four workers --------------------------------------------------------------------------------------------


def one_fleet(start: Start, model: Path) -> MeasuredFleet:
    """The four workers of the quickstart, one of which is killed."""
    config = load("quickstart", ["--fleet.start", start]).config
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        return asyncio.run(_one_fleet(config, model.absolute(), Path(folder)))


async def _one_fleet(config: Config, model: Path, folder: Path) -> MeasuredFleet:
    run = secrets.token_hex(8)
    facts = RunFacts(run, folder, model, 0, f"asyncrl-{run}-0-weights", config)
    with forks_of(config) as forks, LocalLauncher(run, forks=forks) as launcher:
        specs = service_specs(config)
        async with running_fleet(specs, facts, launcher=launcher, report=lambda text: None) as running:
            workers = [each.process.pid for each in running.supervisor.instances.values()]
            pids = [*workers, *(forks.pids.values() if forks is not None else ())]
            pss, rss = (sum(_memory(pid, kind) for pid in pids) for kind in ("Pss", "Rss"))
            async with asyncio.timeout(DEADLINE):
                return MeasuredFleet(await _back(running), pss / MEGABYTE, rss / MEGABYTE)


def _memory(pid: int, kind: str) -> float:
    found = re.search(rf"^{kind}: +(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


async def _back(running: RunningFleet) -> float:
    back = Wakeup()

    def note(event: FleetEvent) -> None:
        if isinstance(event, WorkerStarted):
            back.wake()

    running.subscribers.append(note)
    waiting = asyncio.ensure_future(back.wait())
    (generation,) = (each for each in running.supervisor.instances.values() if each.spec.service == "generation")
    began = time.monotonic()
    os.kill(generation.process.pid, signal.SIGKILL)
    await waiting
    return time.monotonic() - began
