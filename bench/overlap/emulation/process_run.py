"""Runs emulated stages in real processes, over the real lanes, with a model that has no weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.bench.measured_runs import train, write_empty_model
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.telemetry.run_directory import RunDirectory


def prompts(size: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Returns prompts that no service reads."""
    return [{"prompt": f"prompt {number}"} for number in range(size)]


def run_in_processes(values: Mapping[str, Any], services: Mapping[str, ServiceSpec], path: Path) -> RunDirectory:
    """Trains to the last step and returns the run directory. values: keys of the config other than the model's."""
    model = write_empty_model(path.parent / "nothing")
    chosen = {"model.name": str(model), "task.prompts": f"{__name__}:prompts", "training.checkpoint_every": 0}
    train({**values, **chosen}, path, services)
    return RunDirectory(path)
