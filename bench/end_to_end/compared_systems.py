"""Runs one side of the end-to-end measurement in a process of its own: asyncrl, or TRL's GRPOTrainer.

    python -m asyncrl.bench.end_to_end.compared_systems JSON

is the process of asyncrl. JSON: `values` of the config, `lengths` of each sample of a batch, and `run_dir`.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.bench.end_to_end.workload import GROUPS, LEARNING_RATE, MEMBERS, PROMPT_TOKENS, Workload
from asyncrl.bench.measured_runs import environment, run_program, step_seconds, train
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.protocols.service_contracts import Generation
from asyncrl.telemetry.jsonl import read_metrics
from asyncrl.telemetry.run_directory import RunDirectory

BENCH = Path(__file__).resolve().parents[1]
SAMPLER = "asyncrl.bench.end_to_end.benchmark_model:PrescribedLengths"
STAGES = ("generation", "reward", "training")
SLOTS = 256
MICRO_BATCH_TOKENS = 1312
THREADS = 1
"""Modes in which asyncrl runs."""
TRL_STAGES = {"generation": "generation", "reward": "reward_seconds"}


@dataclass(frozen=True, slots=True)
class SideResult:
    """Describes the steps after warm-up. rate: trained tokens per second. seconds, stages: per step, the whole and each
    stage. reward: mean of the last batch."""

    rate: float
    seconds: float
    stages: dict[str, float]
    reward: float


# ---- asyncrl ---------------------------------------------------------------------------------------------


def run_asyncrl(limit: int, ranks: int, workload: Workload, steps: int, warm: int, folder: Path) -> SideResult:
    """Trains with asyncrl. limit: of staleness, 0 for synchronous runs. ranks: of the trainer."""
    slow = workload.parallel_scores is not None
    reward: dict[str, Any] = {"use": f"asyncrl.bench.end_to_end.even_words_reward:{'slowly' if slow else 'at_once'}"}
    if slow:
        reward["options"] = {"parallel_scores": workload.parallel_scores}
    values = {
        "steps": steps + warm,
        "model.name": str(folder / "model"),
        "task.prompts": str(folder / "prompts.jsonl"),
        "task.prompts_per_step": GROUPS,
        "task.samples_per_prompt": MEMBERS,
        "task.max_prompt_tokens": PROMPT_TOKENS,
        "generation.slots": SLOTS,
        "generation.max_new_tokens": max(workload.lengths),
        "reward.functions": [reward],
        "training.learning_rate": LEARNING_RATE,
        "training.micro_batch_tokens": MICRO_BATCH_TOKENS,
        "training.checkpoint_every": 0,
        "training.layout": {"dp": ranks},
        "staleness.limit": limit,
        "fleet.threads": THREADS,
    }
    run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
    request = {"values": values, "lengths": workload.lengths, "run_dir": str(run_dir)}
    run_program([sys.executable, "-m", __name__, json.dumps(request)], environment(THREADS))
    return asyncrl_result(read_metrics(RunDirectory(run_dir).metrics), warm)


def asyncrl_result(lines: Sequence[dict[str, Any]], warm: int) -> SideResult:
    """Reads the records of metrics.jsonl without the first `warm` steps."""
    seconds, stages = step_seconds(lines, warm, STAGES)
    counted = lines[warm:]
    tokens = sum(line["tokens/trained"] for line in counted)
    return SideResult(tokens / (seconds * len(counted)), seconds, stages, counted[-1]["reward/mean"])


# ---- TRL -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrlSettings:
    """Holds how TRL runs. generations: optimizer steps that one generation serves."""

    threads: int
    micro_batch: int
    generations: int = 1
    gradient_checkpointing: bool = False

    def __str__(self) -> str:
        checkpointing = ", gradient checkpointing" if self.gradient_checkpointing else ""
        batches = f"micro-batch {self.micro_batch}, {self.generations} steps a generation"
        return f"{self.threads} threads, {batches}{checkpointing}"


TRL_DEFAULTS = TrlSettings(threads=os.cpu_count() or 1, micro_batch=8, gradient_checkpointing=True)
"""TRL's defaults except for the precision."""


def trl_python() -> Path:
    return Path(os.environ.get("TRL_PYTHON", BENCH.parent / ".venvs/trl/bin/python"))


def run_trl(settings: TrlSettings, workload: Workload, steps: int, warm: int, folder: Path) -> SideResult:
    """Trains with TRL. steps, warm: generations, each of which serves `settings.generations` optimizer steps."""
    request = {
        **asdict(settings),
        "prompts": GROUPS,
        "members": MEMBERS,
        "lengths": workload.lengths,
        "parallel_scores": workload.parallel_scores,
        "steps": (steps + warm) * settings.generations,
        "learning_rate": LEARNING_RATE,
        "model": str(folder / "model"),
        "prompts_file": str(folder / "prompts.jsonl"),
        "output": str(folder / "trl"),
        "reward_folder": str(BENCH / "end_to_end"),
    }
    command = [str(trl_python()), str(BENCH / "rivals/trl_grpo.py"), json.dumps(request)]
    output = run_program(command, environment(settings.threads))
    (result,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return trl_result(json.loads(result.removeprefix("RESULT ")), warm * settings.generations)


def trl_result(lines: Sequence[dict[str, Any]], warm: int) -> SideResult:
    """Reads the steps of `trl_grpo.py`; the time beside generation and reward is training."""
    counted = lines[warm:]
    seconds = counted[-1]["ended"] - lines[warm - 1]["ended"]
    stages = {name: sum(line[key] for line in counted) / len(counted) for name, key in TRL_STAGES.items()}
    stages["training"] = seconds / len(counted) - sum(stages.values())
    rewards = [line["reward"] for line in counted if line["reward"] is not None]
    return SideResult(sum(line["tokens"] for line in counted) / seconds, seconds / len(counted), stages, rewards[-1])


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    sampler = ServiceSpec("generation", Generation, SAMPLER, options={"lengths": given["lengths"]})
    train(given["values"], Path(given["run_dir"]), {"generation": sampler})
