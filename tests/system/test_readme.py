"""The README does what it says: its code runs as written there."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from asyncrl.config.sources import load
from asyncrl.telemetry.jsonl import METRICS, read_metrics
from asyncrl.telemetry.run_directory import RunDirectory

sys.path.insert(0, str(Path(__file__).parent))
from watching import PATIENCE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

pytestmark = pytest.mark.fleet


def block(language: str, containing: str) -> str:
    """The code block of the README in `language` that holds `containing`."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    (found,) = [text for text in blocks if containing in text]
    return str(found)


def run(*command: str, cwd: Path, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def asyncrl(*arguments: str, cwd: Path) -> str:
    return run(sys.executable, "-m", "asyncrl.deploy.cli", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def python_run(project: Path, quickstart_model: Path) -> str:
    """Returns what the example shows; its run finds a model there, as if it had made it at an earlier start."""
    directory = RunDirectory(project / "runs/from-python")
    shutil.copytree(quickstart_model, directory.model)
    directory.run_id()
    (project / "script.py").write_text(block("python", "asyncrl.train("))
    return run(sys.executable, "script.py", cwd=project, ASYNCRL_TELEMETRY__REPORT="true")


def test_the_python_example_runs_as_written(python_run: str) -> None:
    assert "is called in this process" in python_run
    assert re.search(r"^\d\.\d+ \w", python_run, re.MULTILINE)


def test_a_run_leaves_its_report(python_run: str, project: Path) -> None:
    assert "report: " in python_run
    page = (project / "runs/from-python/report.html").read_text()
    for chart in ("Reward", "Staleness of trained tokens", "What workers did", "Timeline of the last steps"):
        assert f'"{chart}"' in page
    assert '<th scope="row">audit</th><td>holds</td>' in page


@pytest.mark.parametrize("number", range(6))
def test_commands_of_the_readme_work_on_a_run(python_run: str, project: Path, number: int) -> None:
    lines = [line.split("#")[0].split() for line in block("sh", "asyncrl samples").splitlines() if line]
    assert len(lines) == 6
    _, *arguments = lines[number]
    if arguments[0] != "doctor":
        assert asyncrl(*arguments, cwd=project)


def test_every_line_of_metrics_has_the_documented_names(
    python_run: str, project: Path, unknown_metrics: Callable[[Mapping[str, object]], list[str]]
) -> None:
    for line in read_metrics(project / "runs/from-python/metrics.jsonl"):
        assert [name for name in METRICS if name not in line] == []
        assert unknown_metrics(line) == []


def test_experiment_file_of_the_readme_parses_and_trains(quickstart_model: Path, project: Path) -> None:
    (project / "my-experiment.toml").write_text(block("toml", 'name = "my-experiment"'))
    assert load(str(project / "my-experiment.toml")).config.staleness.limit == 2
    (project / "my_rewards.py").write_text(block("python", "# my_rewards.py"))
    rows = [{"prompt": f"reverse {word}:", "answer": word[::-1]} for word in ("abo", "tip", "emu")]
    (project / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--model.name",
        str(quickstart_model),
        "--steps",
        "2",
        "--task.prompts_per_step",
        "2",
        "--run-dir",
        "runs/mine",
    ]
    shown = asyncrl("run", "my-experiment.toml", *flags, "--generation.max_new_tokens", "8", cwd=project)
    assert "step 2/2" in shown


def test_importable_reward_is_sent_by_name_also_inside_a_running_loop(quickstart_model: Path, project: Path) -> None:
    (project / "named.py").write_text(
        "def right(sample):\n    return {'right': float(sample.text == sample.row['answer']), 'short': 0.0}\n"
    )
    script = f"""
import asyncio, asyncrl, named
async def notebook():
    rows = [{{"prompt": "reverse abo:", "answer": "oba"}}]
    run = asyncrl.train(model={str(quickstart_model)!r}, prompts=rows, reward=named.right, steps=1,
                        run_dir="runs/notebook", task={{"prompts_per_step": 1}}, evaluate={{"size": 1}})
    print(sorted(name for name in run.metrics[0] if name.startswith("reward/")))
    print(run.evaluate([{{"prompt": "reverse emu:", "answer": "ume"}}]).prompts, run.save_pretrained("saved"))
asyncio.run(notebook())
"""
    (project / "notebook.py").write_text(script)
    shown = run(sys.executable, "notebook.py", cwd=project)
    assert "reward/right/right" in shown
    assert "1 saved" in shown
    assert (project / "saved/config.json").exists()


def test_train_async_reports_all_mistakes_at_once() -> None:
    import asyncrl as package

    wrong = package.train_async(model="warmed:revers", prompts=[{"prompt": "a"}], reward="exact_mach", steps=1)
    with pytest.raises(package.AsyncrlError, match=r"exact_match|reverse"):
        asyncio.run(wrong)
