"""Long mode, only when asked for: thirty minutes of quickstart in which a worker is killed every twenty seconds.

    scripts/test -- -m long -s tests/system/test_soak.py        SOAK_MINUTES=10 for a shorter one

Prints the resident memory of each process, taken every ten seconds, and its slope after the first five minutes.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from torchless_runs import Run  # noqa: E402
from watching import dead  # noqa: E402

MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
pytestmark = [pytest.mark.long, pytest.mark.fleet, pytest.mark.timeout(60 * MINUTES + 300)]

KILL_EVERY = 20.0
LOOK_EVERY = 10.0
WARM_UP = 60.0 * min(5.0, MINUTES / 3)
GROWN_UP = 30.0
"""Seconds a worker that was started again needs until its memory is that of its predecessor."""
ALLOWED_GROWTH = 0.05
"""Of a process's memory over the time that is fitted: what the allocator needs to settle, and the noise of instances
that were started at other moments. The one leak this found made the controller grow by 60 MB a minute."""
KILLED = ("generation", "reward", "evaluation")
Samples = dict[str, list[tuple[float, float]]]


def resident_mb(pid: int) -> float:
    """Private memory and shared; 0 when it has ended."""
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return int(lines["VmRSS"].split()[0]) / 1024
    except (OSError, KeyError):
        return 0.0


class Memory:
    """Samples of each service, and of the controller, by time. Young processes are left out."""

    def __init__(self, run: Run, controller: int, file: Path) -> None:
        self._run = run
        self._controller = controller
        self._file = file
        self._born: dict[int, float] = {}
        self.samples: Samples = defaultdict(list)

    def look(self, now: float) -> None:
        for service, pid in [("controller", self._controller), *self._run.workers()]:
            age = now - self._born.setdefault(pid, now)
            if (resident := resident_mb(pid)) and age >= GROWN_UP:
                self.samples[service].append((now, resident))
                with self._file.open("a") as file:
                    file.write(json.dumps({"time": now, "process": service, "pid": pid, "mb": resident}) + "\n")


def slope(samples: list[tuple[float, float]]) -> float:
    """MB a minute, by least squares."""
    times, sizes = zip(*samples, strict=True)
    return 60 * statistics.linear_regression(times, sizes).slope


def report(samples: Samples, run: Run, kills: int) -> dict[str, float]:
    """Prints; growth of each process as a share of its memory."""
    growths = {}
    sys.stdout.write(f"\n{kills} kills, step {run.version}\n")
    for service, seen in samples.items():
        late = [sample for sample in seen if sample[0] >= WARM_UP]
        if len(late) > 5:
            growths[service] = slope(late) * (late[-1][0] - late[0][0]) / 60 / late[0][1]
            sizes = [size for _, size in late]
            sys.stdout.write(
                f"{service:>11}: {late[0][1]:7.1f} MB after {late[0][0] / 60:.1f} min, {late[-1][1]:7.1f} MB after "
                f"{late[-1][0] / 60:.1f} min, at most {max(sizes):7.1f} MB, {slope(late):+.3f} MB a minute\n"
            )
    return growths


def test_memory_stays_flat_while_workers_are_killed(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ("--steps", "1000000"), "quickstart", standins=False, start=subprocess.Popen)
    chance = random.Random(0)
    kills = 0
    next_kill = KILL_EVERY
    with run.running() as process:
        run.until_step(process, 1)
        began = time.monotonic()
        memory = Memory(run, process.pid, tmp_path / "memory.jsonl")
        while (now := time.monotonic() - began) < 60 * MINUTES:
            assert process.poll() is None, run.shown[-5000:]
            memory.look(now)
            if now >= next_kill:
                next_kill += KILL_EVERY
                kills += kill_one(run, chance.choice(KILLED))
            time.sleep(max(0.0, LOOK_EVERY - (time.monotonic() - began - now)))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, run.shown[-5000:]
    growths = report(memory.samples, run, kills)
    run.audited()
    run.leaves_nothing()
    assert {"controller", "training"} <= growths.keys()
    assert max(growths.values()) < ALLOWED_GROWTH, growths


def kill_one(run: Run, service: str) -> bool:
    pids = [pid for name, pid in run.workers() if name == service and not dead(pid)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return bool(pids)
