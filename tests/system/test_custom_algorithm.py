"""Algorithms of the user's own on real fleets: as documented, by name, resumed, failing and stalling."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.sources import read
from asyncrl.controller.journal.audit import audit
from asyncrl.telemetry.jsonl import read_metrics
from asyncrl.telemetry.run_directory import RunDirectory

sys.path.insert(0, str(Path(__file__).parent))
from programs import ForkedProgram, finished
from watching import PATIENCE

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs"), pytest.mark.slow]
ROOT = Path(__file__).parents[2]
CLI = (sys.executable, "-m", "asyncrl.deploy.cli")
EXAMPLE = next(
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/algorithms/own.md").read_text(), re.DOTALL)
    if "asyncrl.train(" in block
)
ALGORITHMS = """
import os
from asyncio import Event
from asyncrl import Algorithm
from asyncrl.algorithms import grpo


async def roll_out(fleet, control, group):
    if os.environ.get("BREAK") == "raise" and control.version == 2:
        raise KeyError("my own mistake")
    if os.environ.get("BREAK") == "wait":
        await Event().wait()
    if os.environ.get("BREAK") == "drop":
        async for samples in fleet.generation.generate(group.prompts):
            control.generated(samples)
            control.drop(samples, "all")
        return
    await grpo.roll_out(fleet, control, group)


ALGORITHM = Algorithm(roll_out, grpo.train)
"""
SCRIPT = """
import asyncrl, algorithms
asyncrl.train(
    model="MODEL",
    prompts="asyncrl.tasks.builtin.reverse:training",
    reward="exact_match",
    algorithm=algorithms.ALGORITHM,
    steps=4,
    run_dir="runs/RUN",
    task={"prompts_per_step": 2, "samples_per_prompt": 2},
    generation={"max_new_tokens": 8},
    training={"checkpoint_every": 1},
    fleet={"watchdog": 1.0},
)
"""


def variables(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run(*command: str, cwd: Path, code: int = 0, **environ: str) -> str:
    done = finished(command, cwd=cwd, env={**os.environ, **variables(cwd), **environ}, timeout=PATIENCE)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def shown(project: Path, quickstart_model: Path) -> str:
    """Returns what the example shows; its run finds a model there, as if it had made it at an earlier start."""
    directory = RunDirectory(project / "runs/best-and-worst")
    shutil.copytree(quickstart_model, directory.model)
    directory.run_id()
    (project / "example.py").write_text(EXAMPLE)
    return run(sys.executable, "example.py", cwd=project)


Script = Callable[[str], str]


@pytest.fixture
def script(quickstart_model: Path) -> Script:
    """script(run) -> SCRIPT for this run, with a model that was made for other tests as well."""
    return lambda run: SCRIPT.replace("MODEL", str(quickstart_model)).replace("RUN", run)


def test_the_documented_algorithm_has_30_lines_and_runs_as_written(shown: str, project: Path) -> None:
    assert len(EXAMPLE.splitlines()) <= 30
    directory = project / "runs/best-and-worst"
    lines = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert float(shown.splitlines()[-1]) == lines[-1]["data/dropped/middling"] > 0
    found = audit(directory)
    assert found.ok, str(found)
    assert "the algorithm has no importable name: only the same call resumes this run" in shown


def test_command_line_refuses_to_resume_a_run_with_an_algorithm_object(shown: str, project: Path) -> None:
    told = run(*CLI, "run", "--run-dir", "runs/best-and-worst", cwd=project, code=2)
    assert "was started from Python with" in told
    assert "an algorithm that cannot be imported: resume it there, with the same call" in told


def test_raising_algorithm_ends_the_run_which_resumes_once_it_is_corrected(script: Script, project: Path) -> None:
    (project / "algorithms.py").write_text(ALGORITHMS)
    (project / "raises.py").write_text(script("raises"))
    told = run(sys.executable, "raises.py", cwd=project, code=1, BREAK="raise")
    line = next(number for number, text in enumerate(ALGORITHMS.splitlines(), 1) if "raise KeyError" in text)
    assert (
        f"roll_out of algorithms:ALGORITHM raised KeyError: 'my own mistake' ({project}/algorithms.py, line {line})"
        in told
    )
    assert "Resume with: the same call with run_dir=runs/raises" in told
    directory = project / "runs/raises"
    assert read(directory / "config.toml").algorithm.custom == "algorithms:ALGORITHM"
    assert audit(directory).ok

    told = run(*CLI, "run", "--run-dir", "runs/raises", cwd=project)
    assert "step 4/4" in told
    assert [line["step"] for line in read_metrics(directory / "metrics.jsonl")][-1] == 4
    assert audit(directory).ok, str(audit(directory))


def test_an_algorithm_that_drops_everything_ends_the_run(script: Script, project: Path) -> None:
    (project / "algorithms.py").write_text(ALGORITHMS)
    (project / "drops.py").write_text(script("drops"))
    told = run(sys.executable, "drops.py", cwd=project, code=1, BREAK="drop")
    assert re.search(
        r"roll_out of algorithms:ALGORITHM: guards.algorithm_drops .*: \d+ samples were dropped as 'all' and none "
        r"trained since step 0: ",
        told,
    )
    assert "Resume with: the same call with run_dir=runs/drops" in told
    assert audit(project / "runs/drops").ok

    run(sys.executable, "drops.py", cwd=project)
    assert [line["step"] for line in read_metrics(project / "runs/drops/metrics.jsonl")] == [1, 2, 3, 4]


def test_watchdog_names_an_algorithm_that_waits_forever(script: Script, project: Path) -> None:
    (project / "algorithms.py").write_text(ALGORITHMS)
    (project / "waits.py").write_text(script("waits"))
    command = [sys.executable, "waits.py"]
    environ = {**os.environ, **variables(project), "BREAK": "wait"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ForkedProgram(command, cwd=project, env=environ, text=True, **pipes) as process:
        assert process.stdout is not None
        told = []
        for text in process.stdout:
            told.append(text)
            if "waits for asyncrl" in text or "Longest" in text or "No call is outstanding" in text:
                process.send_signal(signal.SIGINT)
                break
        process.communicate(timeout=60)
    line = next(number for number, text in enumerate(ALGORITHMS.splitlines(), 1) if "Event().wait()" in text)
    shown_lines = [text.strip() for text in told if "roll_out of group" in text]
    assert shown_lines == [
        f"roll_out of group 0 has not ended for members (0, 1); waits in {project}/algorithms.py, line {line}"
    ]
    assert any("the algorithm, at version 0: samples" in text for text in told)
