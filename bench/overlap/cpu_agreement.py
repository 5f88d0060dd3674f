"""`asyncrl-bench accounting` compares what the runtime books for a worker that burns CPU time with two other sources.

state clock    seconds booked as busy                            the runtime, at each switch
spans          seconds in the spans of its compute thread        the trace
scheduler      seconds in which Linux had the thread runnable    /proc/self/task/TID/schedstat: on a CPU, or waiting
                                                                 for one, which is no idle time of the worker
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import get_native_id

from asyncrl.bench.measurements import MachineLoad, at_least, goal_line, number, table
from asyncrl.bench.overlap.emulation.process_run import run_in_processes
from asyncrl.bench.overlap.emulation.stage_times import LengthSpread, StageTimes
from asyncrl.bench.overlap.emulation.stages import TimedTraining, emulated_services
from asyncrl.deploy.report.worker_trace import read_trace
from asyncrl.telemetry.run_directory import RunDirectory

GOAL = 0.01
BURN = "burn"
RECORD = "accounting.json"
STEP_SECONDS = 0.2
"""CPU-seconds of a step."""


@dataclass(frozen=True, slots=True)
class BusySeconds:
    """Seconds in which one worker was busy, by three sources. on_cpu: share of the scheduler's in which it ran."""

    state_clock: float
    spans: float
    scheduler: float
    on_cpu: float

    @property
    def disagreement(self) -> float:
        """Returns the largest difference of two sources, as a share of the state clock's."""
        found = (self.state_clock, self.spans, self.scheduler)
        return (max(found) - min(found)) / self.state_clock


class BurningTraining(TimedTraining):
    """Burns the seconds of its steps on the compute thread, and leaves a record when it stops."""

    _thread: int | None = None

    async def spend(self, seconds: float) -> None:
        await self.context.compute.run(self._burn, seconds)

    def _burn(self, seconds: float) -> None:
        self._thread = get_native_id()
        with self.context.tracer.span(BURN):
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                pass

    async def stop(self) -> None:
        if self._thread is not None:
            self._record(self._thread)
        await super().stop()

    def _record(self, thread: int) -> None:
        busy = self.context.clock.spent()[1]["busy"]
        ran, waited = runnable_seconds(Path(f"/proc/self/task/{thread}/schedstat").read_text())
        found = BusySeconds(busy, 0.0, ran + waited, ran / (ran + waited))
        (self.context.facts.run_dir / RECORD).write_text(json.dumps(asdict(found)))


def runnable_seconds(schedstat: str) -> tuple[float, float]:
    """Returns the seconds in which a thread ran, and in which it waited for a CPU, by a file of /proc."""
    ran, waited, _ = schedstat.split()
    return int(ran) / 1e9, int(waited) / 1e9


def busy_seconds(directory: RunDirectory) -> BusySeconds:
    """Returns what the three sources say of the trainer of a finished run."""
    recorded = BusySeconds(**json.loads((directory.path / RECORD).read_text()))
    spans = sum(each.end - each.begin for each in read_trace(directory.logs).slices if each.name == BURN)
    return replace(recorded, spans=spans)


def burn(steps: int, path: Path) -> BusySeconds:
    services = emulated_services(StageTimes(LengthSpread(16), token=0.001, slots=16, step=STEP_SECONDS))
    trainer = replace(services["training"], implementation=f"{__name__}:{BurningTraining.__name__}")
    values = {"steps": steps, "task.prompts_per_step": 4, "task.samples_per_prompt": 4, "generation.slots": 16}
    return busy_seconds(run_in_processes(values, {**services, "training": trainer}, path))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench accounting", description=__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--steps", type=at_least(1), default=30, help="of each run")
    asked = parser.parse_args(arguments)
    load = MachineLoad()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        found = [burn(asked.steps, Path(folder) / f"round{turn}" / "run") for turn in range(asked.rounds)]
    rows = [
        [
            *(f"round {turn}", f"{each.state_clock:.3f}", f"{each.spans:.3f}", f"{each.scheduler:.3f}"),
            *(f"{each.on_cpu:.0%}", f"{each.disagreement:.2%}"),
        ]
        for turn, each in enumerate(found, 1)
    ]
    print(f"busy seconds of a trainer that burns {number(STEP_SECONDS)} CPU-seconds a step, {asked.steps} steps")
    print(table(("", "state clock", "spans", "scheduler", "of that on a CPU", "largest difference"), rows))
    print(goal_line("largest difference", max(each.disagreement for each in found), GOAL, at_most=True))
    print(f"  {load}")
