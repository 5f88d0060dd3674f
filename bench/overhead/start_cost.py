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
from functools import partial
from pathlib import Path

from asyncrl.bench.measurements import (
    MachineLoad,
    RoundValues,
    at_least,
    goal_line,
    in_turn,
    own_seconds,
    ratios,
    table,
)
from asyncrl.config.sources import load
from asyncrl.deploy.process.fork_client import forks_of
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.deploy.service_specs import service_specs
from asyncrl.engines.models.model_preparation import prepare
from asyncrl.fleet.fleet import RunningFleet, running_fleet
from asyncrl.fleet.lifecycle_events import WorkerStarted
from asyncrl.fleet.worker.worker_spec import RunFacts

STARTS = ("fork", "spawn")
FIRST_STEP = "command to first step, s"
MEMORY = "four workers, PSS, MB"
GOALS = {FIRST_STEP: 5.0, "command to first step, CPU-s": 8.0, "killed worker takes calls again, s": 1.0}
"""Upper bounds of figures of forked workers."""
MEMORY_GOAL = 0.6
"""Upper bound of the memory of forked workers as a share of that of spawned ones."""
DEADLINE = 120.0


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench start", description=__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    asked = parser.parse_args(arguments)
    machine = MachineLoad()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        model = asyncio.run(prepare(load("quickstart").config, Path(folder) / "model", print))
        found = in_turn({start: partial(measure, start, model) for start in STARTS}, asked.rounds)
        torch = RoundValues(tuple(import_torch() for _ in range(asked.rounds)))
    fork, spawn = (
        {name: RoundValues(tuple(each[name] for each in found[start])) for name in found[start][0]} for start in STARTS
    )
    print(f"quickstart, {asked.rounds} rounds in turn; median [least - most]")
    share = fork[FIRST_STEP].median / torch.median
    print(f"import torch in a fresh Python: {torch} s; command to first step, forked, takes {share:.1f} times that")
    print(table(["", *STARTS], [[name, str(fork[name]), str(spawn[name])] for name in fork]))
    for name, goal in GOALS.items():
        print(goal_line(f"{name}, forked", fork[name].median, goal, at_most=True))
    memory = ratios(fork[MEMORY], spawn[MEMORY]).median
    print(goal_line("memory (PSS) of four workers, forked over spawned", memory, MEMORY_GOAL, at_most=True))
    print(machine)


def measure(start: str, model: Path) -> dict[str, float]:
    """Returns the figures of one round by their names in the table. start: one of STARTS."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        return {**first_step(start, model, folder), **asyncio.run(four_workers(start, model, folder))}


def first_step(start: str, model: Path, folder: str) -> dict[str, float]:
    """Runs the quickstart until it shows its first step."""
    program = [sys.executable, "-m", "asyncrl.deploy.cli", "run", "quickstart", "--run-dir", f"{folder}/run"]
    keys = ["--model.name", str(model), "--evaluate.every", "250", "--fleet.start", start]
    cpu = own_seconds()
    began = time.monotonic()
    run = subprocess.Popen([*program, *keys], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert run.stdout is not None
        assert any(re.match(r"step \d+/", line) for line in run.stdout), "it ended before its first step"
        wall = time.monotonic() - began
        return {FIRST_STEP: wall, "command to first step, CPU-s": own_seconds() - cpu}
    finally:
        run.kill()
        run.communicate(timeout=DEADLINE)


def import_torch() -> float:
    """Returns the seconds that a fresh Python takes to import torch."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=DEADLINE)
    return time.monotonic() - began


async def four_workers(start: str, model: Path, folder: str) -> dict[str, float]:
    """Measures the memory of the four workers of the quickstart, and kills one of them."""
    config = load("quickstart", ["--fleet.start", start]).config
    run = secrets.token_hex(8)
    facts = RunFacts(run, Path(folder), model, 0, f"asyncrl-{run}-0-weights", config)
    with forks_of(config) as forks, LocalLauncher(run, forks=forks) as launcher:
        specs = service_specs(config)
        async with running_fleet(specs, facts, launcher=launcher, report=lambda text: None) as running:
            workers = [int(each.launched.labels["pid"]) for each in running.supervisor.instances.values()]
            pids = [*workers, *(forks.pids.values() if forks is not None else ())]
            pss, rss = (sum(_megabytes(pid, kind) for pid in pids) for kind in ("Pss", "Rss"))
            async with asyncio.timeout(DEADLINE):
                back = await _seconds_until_back(running)
    return {"killed worker takes calls again, s": back, MEMORY: pss, "four workers, RSS, MB": rss}


def _megabytes(pid: int, kind: str) -> float:
    found = re.search(rf"^{kind}: +(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


async def _seconds_until_back(running: RunningFleet) -> float:
    """Kills the generation worker, and waits until it takes calls again."""
    back = asyncio.Event()
    running.subscribers.append(lambda event: back.set() if isinstance(event, WorkerStarted) else None)
    (generation,) = (each for each in running.supervisor.instances.values() if each.spec.service == "generation")
    began = time.monotonic()
    os.kill(int(generation.launched.labels["pid"]), signal.SIGKILL)
    await back.wait()
    return time.monotonic() - began
