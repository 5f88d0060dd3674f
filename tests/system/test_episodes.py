"""Episodes on a whole fleet: the policy learns to use what an environment tells it, also when workers are killed."""

import ast
import json
import os
import re
import shlex
import signal
import sys
from contextlib import closing
from pathlib import Path
from statistics import fmean

import pytest

from asyncrl.controller.journal.audit import audit
from asyncrl.controller.journal.journal import Scan
from asyncrl.controller.journal.ledger import Generated, Resumed
from asyncrl.controller.journal.run_storage import FileStore
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer
from tests.unit.documents import files_of

sys.path.insert(0, str(Path(__file__).parent))
from programs import finished
from test_deaths import ended, running, until_step
from watching import PATIENCE, pid_of

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]

STEPS = 50
WITHHELD_STEPS = 15
HELD = """
import asyncio
from pathlib import Path
from asyncrl import Observation

class Held:
    async def reset(self, row, seed):
        self.turns = 0
        self.held = Path(__file__).with_name("held").exists() and sum(row["prompt"].encode()) % 4 == 1
        return Observation(row["prompt"])
    async def step(self, message):
        self.turns += 1
        if self.held and self.turns == 2:
            await asyncio.Event().wait()
        return Observation(":", reward=message.count("a"), done=self.turns == 4)
"""
KILLED_AFTER = 2


def command(run_dir: Path, steps: int, file: str = "calculator", *flags: str) -> list[str]:
    common = ["--steps", str(steps), "--evaluate.prompts=", "--run-dir", str(run_dir)]
    return [sys.executable, "-m", "asyncrl.deploy.cli", "run", file, *common, *flags]


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_policy_learns_to_call_a_calculator_while_workers_die(calculator_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running(command(run_dir, STEPS, "calculator", "--model.name", str(calculator_model))) as process:
        until_step(process, 4)
        os.kill(pid_of(run_dir, "environment"), signal.SIGKILL)
        until_step(process, 8)
        os.kill(pid_of(run_dir, "generation"), signal.SIGKILL)
        code, shown = ended(process)
    assert code == 0, shown
    log = (run_dir / "logs/controller.jsonl").read_text()
    assert "lost environment0.0" in log
    assert "lost generation0.0" in log
    steps = metrics(run_dir)
    assert fmean(step["reward/mean"] for step in steps[-5:]) > 0.8
    assert fmean(step["episodes/turns_mean"] for step in steps[-5:]) > 1.5
    assert all(step["staleness/max"] <= 2 for step in steps)
    report = audit(run_dir)
    assert report.ok, str(report)


def held_experiment(folder: Path, model: Path) -> Path:
    """Writes an experiment with episodes of four turns. Those of four of the first ten groups wait in their second
    turn while a file is there; the other six are enough for the steps until the run is killed."""
    (folder / "held.py").write_text(HELD)
    (folder / "held").touch()
    file = folder / "held.toml"
    file.write_text(
        f'name = "held"\n[model]\nname = "{model}"\n'
        '[task]\nprompts = "asyncrl.tasks.builtin.reverse:training"\nprompts_per_step = 2\nsamples_per_prompt = 4\n'
        "max_prompt_tokens = 16\n[generation]\nslots = 16\nmax_new_tokens = 4\n"
        '[environment]\nuse = "held.py:Held"\nmax_turns = 4\nmax_tokens = 48\ndeadline = 240\n'
        "[training]\ncheckpoint_every = 1\nbackground_checkpoints = false\n[staleness]\nlimit = 4\n"
    )
    return file


def test_episodes_go_on_after_their_last_turn_when_a_killed_run_is_resumed(
    quickstart_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    file = held_experiment(tmp_path, quickstart_model)
    with running(command(run_dir, KILLED_AFTER + 4, str(file))) as process:
        until_step(process, KILLED_AFTER)
        os.kill(process.pid, signal.SIGKILL)
    (tmp_path / "held").unlink()
    with running(command(run_dir, KILLED_AFTER + 4, str(file))) as process:
        code, shown = ended(process)
    assert code == 0, shown
    assert re.search(r"[1-9]\d* episodes go on after their last turn", shown), shown
    with closing(FileStore(run_dir, writable=False)) as store:
        records = [framed.record for framed in Scan(store).surviving()]
    (resumed,) = [number for number, record in enumerate(records) if isinstance(record, Resumed)]
    made_before = [
        first < records[resumed].version
        for record in records[resumed:]
        if isinstance(record, Generated)
        for _, first, _, _ in record.samples
    ]
    assert any(made_before), "a sample that ends after the resume begins with tokens of before"
    report = audit(run_dir)
    assert report.ok, str(report)


def test_without_the_results_of_the_calculator_nothing_is_learnt(calculator_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ("--model.name", str(calculator_model), "--environment.options.withhold", "true")
    with running(command(run_dir, WITHHELD_STEPS, "calculator", *flags)) as process:
        code, said = ended(process)
    assert code == 0, said
    assert max(step["reward/mean"] for step in metrics(run_dir)) < 0.2


def test_the_example_of_python_runs_with_a_model_that_was_made_before(quickstart_model: Path, tmp_path: Path) -> None:
    example = files_of("environments.md", tmp_path)["play.py"]
    text = example.read_text()
    assert text.count('"warmed:reverse"') == 1
    example.write_text(text.replace('"warmed:reverse"', f'"{quickstart_model}"'))
    done = finished([sys.executable, "play.py"], cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    turns = ast.literal_eval(done.stdout.splitlines()[-1])
    assert [turn["content"] for turn in turns if turn["role"] == "user"] == ["no"] * 4 or "yes" in str(turns)


def test_the_policy_trains_inside_an_agent_while_the_environment_dies(tmp_path: Path) -> None:
    """Each episode is a process of its own, which ends with it."""
    run_dir = tmp_path / "run"
    file = tmp_path / "agent.toml"
    shown = Path(__file__).parents[2].joinpath("asyncrl/experiments/calculator.toml").read_text()
    agent = shlex.join([sys.executable, "-S", str(Path(__file__).with_name("calculator_agent.py"))])
    used = f'use = {json.dumps(f"agent:{agent}")}\noptions = {{ reward = "last_line" }}\ndeadline = 60'
    tokenizer = build_tokenizer(())
    for made in (tokenizer, build_model(tokenizer)):
        made.save_pretrained(tmp_path / "model")
    changes = {
        'name = "warmed:calculator"': f"name = {json.dumps(str(tmp_path / 'model'))}",
        'use = "calculator"': used,
        "prompts_per_step = 8": "prompts_per_step = 2",
        "samples_per_prompt = 16": "samples_per_prompt = 2",
    }
    for before, after in changes.items():
        assert shown.count(f"\n{before}\n") == 1
        shown = shown.replace(f"\n{before}\n", f"\n{after}\n")
    file.write_text(shown)
    with running(command(run_dir, 4, str(file))) as process:
        until_step(process, 1)
        os.kill(pid_of(run_dir, "environment"), signal.SIGKILL)
        code, said = ended(process)
    assert code == 0, said
    assert "lost environment0.0" in (run_dir / "logs/controller.jsonl").read_text()
    report = audit(run_dir)
    assert report.ok, str(report)
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    last = {turn["content"] for sample in samples for turn in sample["turns"] if turn["role"] == "agent"}
    assert last == {"0.0\n"}, "a policy that knows nothing asks no product"
    programs = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"calculator_agent.py" in program for program in programs)
