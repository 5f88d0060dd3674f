"""Runs an experiment of a policy that acts until its last 20 episodes reach a goal: transitions and seconds until then.

    python -m asyncrl.bench.learning.acting_goals cartpole 475 --seed 0

Seconds count from the start of the command; those of training from the start of the fleet. The rival that does the same
is bench/rivals/stable_baselines_acting.py.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.telemetry.jsonl import read_metrics

EPISODES = 20
LOOK = 0.2
"""Seconds between two looks at the metrics."""
END = 60.0
"""Seconds that a run may take to end with a checkpoint."""


def until_goal(lines: Sequence[dict[str, Any]], goal: float) -> tuple[Sequence[dict[str, Any]], bool]:
    """Returns the lines up to the first at which the mean return of the last 20 episodes is the goal or more, and True;
    all lines and False if there is none."""
    episodes = 0.0
    for number, line in enumerate(lines, 1):
        episodes += line["acting/episodes"]
        if episodes >= EPISODES and line["acting/return_last20"] >= goal:
            return lines[:number], True
    return lines, False


def run_to_goal(experiment: str, goal: float, seed: int, folder: Path) -> dict[str, Any]:
    """Returns what it took; `reached` is False where the steps of the experiment ended before. transitions: all that
    environments took, also those that were masked."""
    metrics = folder / "run/metrics.jsonl"
    began = time.monotonic()
    flags = ["--run-dir", str(folder / "run"), "--seed", str(seed), "--telemetry.report", "false"]
    command = [sys.executable, "-m", "asyncrl.deploy.cli", "run", experiment, *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        reached = False
        while not reached and process.poll() is None:
            time.sleep(LOOK)
            reached = metrics.exists() and until_goal(read_metrics(metrics), goal)[1]
        seconds = time.monotonic() - began
        process.send_signal(signal.SIGTERM)
        process.wait(END)
    lines, reached = until_goal(read_metrics(metrics), goal)
    return {
        "experiment": experiment,
        "seed": seed,
        "reached": reached,
        "transitions": sum(line["tokens/response"] for line in lines),
        "seconds": round(seconds, 1),
        "training_seconds": round(lines[-1]["time"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("goal", type=float)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run_to_goal(asked.experiment, asked.goal, asked.seed, Path(folder))))


if __name__ == "__main__":
    main()
