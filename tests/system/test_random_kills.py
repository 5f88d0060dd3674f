"""kill -9 at random moments of whole runs, starts included: the same command goes on, nothing is trained twice, nothing
vanishes, nothing is left. Six kills in CI; in the long mode forty without torch and ten of quickstart:

    scripts/test -- -m long tests/system/test_random_kills.py
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from torchless_runs import Run  # noqa: E402
from watching import PATIENCE  # noqa: E402

pytestmark = [pytest.mark.fleet, pytest.mark.kills]

WORKERS = ("generation", "reward", "training")
FOR_EVER = ("--steps", "1000000", "--training.checkpoint_every", "5")


def one_killed(run: Run, process: "subprocess.Popen[str]", victim: str) -> bool:
    """Whether there was somebody to kill."""
    if victim == "controller":
        process.kill()
        return True
    ours = run.processes()
    pids = [pid for service, pid in run.workers() if service == victim and pid in ours]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return bool(pids)


def one_life(run: Run, chance: random.Random, kills: int, seconds: float) -> int:
    """From a start to a death that ends the run, or to the last of so many kills; how many there were."""
    killed = 0
    with run.running() as process:
        while killed < kills and process.poll() is None:
            time.sleep(chance.uniform(0.1, seconds))
            victim = chance.choice(("controller", *WORKERS))
            if one_killed(run, process, victim):
                killed += 1
                if victim == "controller":
                    process.wait(PATIENCE)
        code = process.poll()
    assert code in (None, -signal.SIGKILL, 75), f"it ended with {code}:\n{run.shown}"
    return killed


def killed_at_random(run: Run, kills: int, seconds: float, seed: int) -> None:
    """seconds: the longest pause between two kills."""
    chance = random.Random(seed)
    left = kills
    while left:
        left -= one_life(run, chance, left, seconds)
        run.leaves_nothing()
        if (run.directory / "journal").exists():
            run.audited()
    run.goes_on(10)
    trained = run.trained()
    assert list(trained) == list(range(1, len(trained) + 1))
    assert len(trained) >= 10


def test_run_survives_a_few_kills(tmp_path: Path) -> None:
    killed_at_random(Run(tmp_path / "run", FOR_EVER, start=subprocess.Popen), kills=6, seconds=2.0, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_run_survives_forty_kills(seed: int, tmp_path: Path) -> None:
    killed_at_random(Run(tmp_path / "run", FOR_EVER, start=subprocess.Popen), kills=10, seconds=5.0, seed=seed)


@pytest.mark.long
def test_quickstart_survives_ten_kills(tmp_path: Path) -> None:
    killed_at_random(
        Run(tmp_path / "run", FOR_EVER, "quickstart", standins=False, start=subprocess.Popen),
        kills=10,
        seconds=25.0,
        seed=0,
    )
