"""Starts the runs that benchmarks measure, all sides with one environment, and reads the seconds of their steps."""

import asyncio
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from asyncrl.config.sources import load
from asyncrl.deploy.run_fleet import RunRequest
from asyncrl.deploy.run_setup import run
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.telemetry.display import LineDisplay

MALLOC = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:glibc.malloc.top_pad=268435456"
RUN_DEADLINE = 1800.0
"""Seconds for one run of a side."""


def write_empty_model(folder: Path) -> Path:
    """Writes a model folder for stages that load none, which the checks before a start let pass."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    save_file({}, folder / "model.safetensors")
    return folder


def environment(threads: int) -> dict[str, str]:
    """Returns the environment of a side. Waiting threads must not spin: they would take CPU time from other workers."""
    chosen = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "GLIBC_TUNABLES": MALLOC}
    chosen |= {"TOKENIZERS_PARALLELISM": "false", "ASYNCRL_TELEMETRY__REPORT": "false"}
    return {**os.environ, **chosen}


def run_program(command: Sequence[str], variables: dict[str, str], deadline: float = RUN_DEADLINE) -> str:
    """Returns the standard output of a program. Raises SystemExit with the end of its output when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline, check=False, env=variables)
    if done.returncode != 0:
        raise SystemExit(f"{command[:3]} failed\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def train(values: Mapping[str, Any], run_dir: Path, services: Mapping[str, ServiceSpec] | None = None) -> None:
    """Trains in this process, without a display. services: specifications that replace those of the config."""
    config = load(None, (), values={"telemetry.report": False, **values}).config
    display = LineDisplay(StringIO(), config.steps)
    asyncio.run(run(RunRequest(config, run_dir, display, "asyncrl-bench", services=services or {})))


def step_seconds(
    lines: Sequence[Mapping[str, float]], warm: int, stages: Iterable[str]
) -> tuple[float, dict[str, float]]:
    """Returns the mean seconds of a step, and those for which each stage is busy in it. lines: records of
    `metrics.jsonl`; the first `warm` of them are left out, during which the pipeline fills."""
    pairs = [(line, line["time"] - before["time"]) for before, line in pairwise(lines[warm - 1 :])]
    busy = {stage: fmean(line[f"time/{stage}/busy"] * seconds for line, seconds in pairs) for stage in stages}
    return fmean(seconds for _, seconds in pairs), busy
