"""Sends metrics to Weights & Biases, which reads WANDB_PROJECT, WANDB_MODE and its other environment variables."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb


class WandbSink:
    """Writes to one wandb run per run directory; a resumed run resumes it."""

    def __init__(self, run_dir: Path, name: str, config: Mapping[str, Any]) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "asyncrl"),
            dir=str(run_dir),
            name=name,
            config=dict(config),
            id=_run_id(run_dir),
            resume="allow",
        )
        # An evaluation of version v may arrive after later steps; wandb's own step could not go back.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


def _run_id(run_dir: Path) -> str | None:
    named = run_dir / "run.id"
    return f"asyncrl-{named.read_text().strip()}" if named.exists() else None
