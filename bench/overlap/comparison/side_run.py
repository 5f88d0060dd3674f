"""Runs one side of a comparison: in processes of its own, or on the virtual clock in this one.

    python -m asyncrl.bench.overlap.comparison.side_run JSON

is the process of a side that runs in real time. JSON: the fields of SideRequest.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl.bench.measured_runs import environment, run_program, train, write_empty_model
from asyncrl.bench.overlap.accounting import Overlap, overlap_of
from asyncrl.bench.overlap.comparison.sides import Engine
from asyncrl.bench.overlap.emulation.stage_times import StageTimes
from asyncrl.bench.overlap.emulation.stages import emulated_services
from asyncrl.bench.overlap.emulation.virtual_run import run_on_virtual_clock
from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.deploy.report.run_record import read_run
from asyncrl.deploy.report.worker_trace import read_trace
from asyncrl.errors import ConfigError
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


MEASURED = {
    "evaluate.prompts": "",
    "training.checkpoint_every": 0,
    "telemetry.trace": True,
    "telemetry.samples_per_step": 0,
}
"""Keys of every side: what is measured is the loop of steps."""
FOREVER = 1e9
DEADLINES = ("generation.deadline", "fleet.call_deadline", "staleness.publish_deadline")
EMULATED = {"environment.use": "", **dict.fromkeys(DEADLINES, FOREVER)}
WITHOUT_MACHINE = {"model.name": "none", "task.prompts": "none", "fleet.watchdog": FOREVER}


@dataclass(frozen=True, slots=True)
class SideRequest:
    """Says what to run. experiment: name or file; flags, values: keys over it. times: of emulated stages."""

    engine: Engine
    experiment: str
    run_dir: str
    flags: Sequence[str] = ()
    values: dict[str, Any] = field(default_factory=dict)
    times: Mapping[str, Any] | None = None


def run_side(request: SideRequest) -> Overlap:
    """Runs a side to its end and returns its accounting."""
    if request.engine == "virtual":
        _run_here(request)
    else:
        threads = int(request.values.get("fleet.threads", 1))
        run_program([sys.executable, "-m", __name__, json.dumps(asdict(request))], environment(threads))
    directory = RunDirectory(Path(request.run_dir))
    return overlap_of(read_run(directory.path), read_trace(directory.logs))


def side_config(request: SideRequest) -> Config:
    """Returns the config of a side. Raises ConfigError for mistakes, and for what emulated stages cannot be."""
    values = {**MEASURED, **request.values}
    if request.engine != "real":
        values |= EMULATED
    if request.engine == "virtual":
        values |= WITHOUT_MACHINE
    config = load(request.experiment, request.flags, values=values).config
    if request.engine != "real" and config.algorithm.advantage in ("gae", "greedy"):
        raise ConfigError(
            f"{request.experiment} trains with algorithm.advantage = {config.algorithm.advantage!r}, and emulated "
            "engines have no critic and no greedy answers: measure it with --engine real"
        )
    return config


def _run_here(request: SideRequest) -> None:
    config = side_config(request)
    path = Path(request.run_dir)
    if request.engine == "real":
        train(config.model_dump(mode="json"), path)
        return
    assert request.times is not None, "the command gives the times of emulated stages"
    times = replace(StageTimes.of(request.times), slots=config.generation.slots)
    values = config.model_dump(mode="json")
    values["algorithm"]["kl"] = 0.1 if times.reference else 0.0
    services = emulated_services(times, config.generation.replicas)
    if request.engine == "virtual":
        run_on_virtual_clock(load(None, (), values=values).config, services, path)
    else:
        run_in_processes(values, services, path)


if __name__ == "__main__":
    _run_here(SideRequest(**json.loads(sys.argv[1])))
