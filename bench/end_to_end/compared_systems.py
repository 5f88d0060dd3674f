"""What the end-to-end measurement trains on: prompts, lengths, a judge; and the sides that do it, ours and TRL."""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.bench.figures import stage_seconds
from asyncrl.rundir import RunDirectory
from asyncrl.telemetry.metrics import read_metrics

GROUPS, MEMBERS = 64, 8
SAMPLES = GROUPS * MEMBERS
PROMPT_TOKENS, PROMPTS = 8, 1024
LEARNING_RATE = 1e-4
ROOT = Path(__file__).resolve().parents[1]
MALLOC = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:glibc.malloc.top_pad=268435456"
PATIENCE = 1800.0


@dataclass(frozen=True, slots=True)
class Workload:
    """lengths: of each sample of a batch. seats: samples judged at a time, 0 for all; None: the judge is instant."""

    name: str
    lengths: tuple[int, ...]
    seats: int | None
    over_trl: float
    over_synchronous: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the steps after warm-up. rate: trained tokens a second. seconds: of a step; stages: of it in each stage.
    reward: mean of the last batch."""

    rate: float
    seconds: float
    stages: dict[str, float]
    reward: float


@dataclass(frozen=True, slots=True)
class TrlSettings:
    """generations: optimizer steps that one generation serves."""

    threads: int
    micro_batch: int
    generations: int = 1
    gradient_checkpointing: bool = False

    def __str__(self) -> str:
        checkpointing = ", gradient checkpointing" if self.gradient_checkpointing else ""
        batches = f"micro-batch {self.micro_batch}, {self.generations} steps a generation"
        return f"{self.threads} threads, {batches}{checkpointing}"


AS_GIVEN = TrlSettings(threads=os.cpu_count() or 1, micro_batch=8, gradient_checkpointing=True)
"""TRL's defaults but for the precision."""


def write_prompts(folder: Path) -> Path:
    source, file = random.Random(0), folder / "prompts.jsonl"
    words = [" ".join(f"w{source.randrange(2000)}" for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))
    return file


def environment(threads: int) -> dict[str, str]:
    """The same for every side. Threads that spin while they wait would steal from whoever works beside them."""
    chosen = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "GLIBC_TUNABLES": MALLOC}
    return {**os.environ, **chosen, "TOKENIZERS_PARALLELISM": "false"}


# ---- ours ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Own:
    """How ours runs. limit: of staleness, 0 is asynchrony off. ranks: of the trainer."""

    limit: int
    ranks: int = 1
    slots: int = 256
    micro_batch_tokens: int = 1312
    threads: int = 1


def run_own(own: Own, workload: Workload, steps: int, warm: int, folder: Path) -> Outcome:
    run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
    order = {
        "values": own_values(own, workload, steps + warm, folder),
        "lengths": workload.lengths,
        "run_dir": str(run_dir),
    }
    _run([sys.executable, "-m", "asyncrl.bench.own_run", json.dumps(order)], environment(own.threads))
    return own_outcome(read_metrics(RunDirectory(run_dir).metrics), warm)


def own_values(own: Own, workload: Workload, steps: int, folder: Path) -> dict[str, Any]:
    slow = workload.seats is not None
    judge = {"use": f"asyncrl.bench.judging:{'slowly' if slow else 'at_once'}"}
    return {
        "steps": steps,
        "model.name": str(folder / "model"),
        "task.prompts": str(folder / "prompts.jsonl"),
        "task.prompts_per_step": GROUPS,
        "task.samples_per_prompt": MEMBERS,
        "task.max_prompt_tokens": PROMPT_TOKENS,
        "generation.slots": own.slots,
        "generation.max_new_tokens": max(workload.lengths),
        "reward.functions": [{**judge, "options": {"seats": workload.seats}} if slow else judge],
        "training.learning_rate": LEARNING_RATE,
        "training.micro_batch_tokens": own.micro_batch_tokens,
        "training.checkpoint_every": 0,
        "training.layout_dp": own.ranks,
        "staleness.limit": own.limit,
        "fleet.threads": own.threads,
    }


def own_outcome(lines: Sequence[dict[str, Any]], warm: int) -> Outcome:
    """lines: of metrics.jsonl. The first `warm` steps are left out: until then the pipeline fills."""
    counted = lines[warm:]
    seconds = counted[-1]["time"] - lines[warm - 1]["time"]
    stages = stage_seconds(lines, warm, ("generation", "reward", "training"))
    tokens = sum(line["tokens/trained"] for line in counted)
    return Outcome(tokens / seconds, seconds / len(counted), stages, counted[-1]["reward/mean"])


# ---- TRL -------------------------------------------------------------------------------------------------


def trl_python() -> Path:
    return Path(os.environ.get("TRL_PYTHON", ROOT / ".venvs/trl/bin/python"))


def run_trl(trl: TrlSettings, workload: Workload, steps: int, warm: int, folder: Path) -> Outcome:
    """steps, warm: generations; each serves as many optimizer steps as the settings say."""
    order = {
        "threads": trl.threads,
        "micro_batch": trl.micro_batch,
        "generations": trl.generations,
        "gradient_checkpointing": trl.gradient_checkpointing,
        "prompts": GROUPS,
        "members": MEMBERS,
        "lengths": workload.lengths,
        "seats": workload.seats,
        "steps": (steps + warm) * trl.generations,
        "learning_rate": LEARNING_RATE,
        "model": str(folder / "model"),
        "prompts_file": str(folder / "prompts.jsonl"),
        "output": str(folder / "trl"),
        "judging": str(ROOT / "bench"),
    }
    said = _run([str(trl_python()), str(ROOT / "bench/peers/trl_grpo.py"), json.dumps(order)], environment(trl.threads))
    (result,) = [line for line in said.splitlines() if line.startswith("RESULT ")]
    return trl_outcome(json.loads(result.removeprefix("RESULT ")), warm * trl.generations)


def trl_outcome(lines: Sequence[dict[str, Any]], warm: int) -> Outcome:
    counted = lines[warm:]
    seconds = counted[-1]["at"] - lines[warm - 1]["at"]
    stages = {name: sum(line[key] for line in counted) / len(counted) for name, key in _TRL_STAGES.items()}
    stages["training"] = seconds / len(counted) - sum(stages.values())
    rewards = [line["reward"] for line in counted if line["reward"] is not None]
    return Outcome(sum(line["tokens"] for line in counted) / seconds, seconds / len(counted), stages, rewards[-1])


_TRL_STAGES = {"generation": "generation", "reward": "judging"}


def _run(command: Sequence[str], variables: dict[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=variables)
    if done.returncode != 0:
        raise SystemExit(f"{command[:3]} failed\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout
