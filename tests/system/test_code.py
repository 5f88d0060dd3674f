"""Programs on a whole fleet: a slow sandbox holds up no step, and no sandbox outlives the worker that it served."""

import gzip
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.controller.journal.audit import audit
from tests.processes import descendants

sys.path.insert(0, str(Path(__file__).parent))
from test_deaths import ended, running, until_step
from watching import dead, pid_of, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.kills, pytest.mark.usefixtures("programs")]

STEPS = 12
SLOW_SECONDS = 4

TASK = f"""
from asyncrl.tasks.builtin import expressions
from asyncrl.tasks.builtin.words import Demonstrations

def said(source):
    prompt = expressions.training(1, source.random())[0]["prompt"]
    return prompt, "def f(x): return x" + "+" * 9 * (source.random() < 0.4)

WARMED = Demonstrations(draw=said, words=expressions.WORDS, steps=40)

def rows(size=100, seed=0):
    made = expressions.training(size, seed)
    for row in made[::4]:
        row["tests"] = ["import time\\ntime.sleep({SLOW_SECONDS})\\n" + row["tests"][0]]
    return made
"""


@pytest.fixture
def flags(bubblewrap_works: None, tmp_path: Path) -> list[str]:
    (tmp_path / "task.py").write_text(TASK)
    keys = {"model.name": f"warmed:{tmp_path}/task.py:WARMED", "task.prompts": f"{tmp_path}/task.py:rows"}
    keys |= {"task.prompts_per_step": "2", "task.samples_per_prompt": "4", "evaluate.prompts": ""}
    return [word for key, value in keys.items() for word in (f"--{key}={value}",)]


def calls(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """The spans of calls of this name."""
    with gzip.open(run_dir / "trace.json.gz", "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return [each for each in events if each["name"] == name and each["ph"] == "X"]


def spans(run_dir: Path, name: str) -> list[tuple[float, float]]:
    """When calls of this name began and ended."""
    return [(each["ts"], each["ts"] + each["dur"]) for each in calls(run_dir, name)]


def scored_while_others_are_sampled(run_dir: Path) -> list[dict[str, Any]]:
    """The score calls that began while other samples of the same group were generated."""
    sampled = [(each["args"]["group"], each["ts"], each["ts"] + each["dur"]) for each in calls(run_dir, "generate")]
    return [
        each
        for each in calls(run_dir, "score")
        for group, began, end in sampled
        if each["args"].get("group") == group and began < each["ts"] < end
    ]


def test_steps_go_on_beside_slow_programs_and_no_sandbox_outlives_its_worker(flags: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "asyncrl.deploy.cli", "run", "code", "--run-dir", str(run_dir), *flags]
    with running([*command, "--steps", str(STEPS)]) as process:
        until_step(process, 3)
        reward = pid_of(run_dir, "reward")
        sandboxes = descendants(reward)
        assert len(sandboxes) > 3, "the child with its guard, and sandboxes"
        os.kill(reward, signal.SIGKILL)
        wait_until(lambda: all(map(dead, sandboxes)), "the end of the sandboxes")
        code, shown = ended(process)
    assert code == 0, shown
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= step["code/pass_rate"] <= step["code/compile_rate"] <= 1 for step in steps)
    assert max(step["code/compile_rate"] for step in steps) > 0
    assert audit(run_dir).ok
    slow = [(began, end) for began, end in spans(run_dir, "score") if end - began > SLOW_SECONDS * 1e6]
    inside = [step for step in spans(run_dir, "step") if any(began < step[0] and step[1] < end for began, end in slow)]
    assert inside, "a step begins and ends while a slow program is scored"
    generated = spans(run_dir, "generate")
    assert any(began < each[0] and each[1] < end for began, end in slow for each in generated)
    assert scored_while_others_are_sampled(run_dir), "early samples are rewarded while later ones are generated"


def test_a_stopped_run_ends_soon_and_leaves_no_sandbox(flags: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "asyncrl.deploy.cli", "run", "code", "--run-dir", str(run_dir), *flags]
    with running([*command, "--steps", "1000"]) as process:
        until_step(process, 1)
        everything = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        code, shown = ended(process)
    assert code == 0, shown
    assert "did not end within" not in shown
    wait_until(lambda: all(map(dead, everything)), "the end of all processes of the run")
