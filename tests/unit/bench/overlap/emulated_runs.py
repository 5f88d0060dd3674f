"""Runs emulated stages on the virtual clock and reads what was recorded."""

from pathlib import Path
from typing import Any

from asyncrl.bench.overlap.accounting import Overlap, overlap_of
from asyncrl.bench.overlap.side_run import run_on_virtual_clock
from asyncrl.bench.overlap.timed_services import LengthSpread, StageTimes, timed_services
from asyncrl.config.sources import load
from asyncrl.deploy.report.run_record import read_run
from asyncrl.deploy.report.worker_trace import read_trace

FOREVER = 1e6
SAMPLES = 64
"""Samples of a step, of equal length, all of which the generator decodes side by side."""


def virtual_overlap(
    path: Path, limit: int, *, generation: float, steps: int = 24, values: dict[str, Any] | None = None, **stages: float
) -> Overlap:
    """Runs batches of 64 samples. generation: seconds of a batch; stages: further seconds, as in StageTimes."""
    times = StageTimes(LengthSpread(100), token=generation / 100, slots=SAMPLES, **stages)  # type: ignore[arg-type]
    chosen = {
        "model.name": "none",
        "task.prompts": "none",
        "task.prompts_per_step": 8,
        "task.samples_per_prompt": 8,
        "generation.slots": SAMPLES,
        "generation.max_new_tokens": 4096,
        "generation.deadline": FOREVER,
        "fleet.call_deadline": FOREVER,
        "fleet.watchdog": FOREVER,
        "staleness.limit": limit,
        "steps": steps,
    }
    config = load(None, (), values=chosen | (values or {})).config
    directory = run_on_virtual_clock(config, timed_services(times), path)
    return overlap_in(directory.path)


def overlap_in(path: Path) -> Overlap:
    return overlap_of(read_run(path), read_trace(path / "logs"))
