"""Runs one side of a comparison: in processes of its own, or on the virtual clock in this one.

    python -m asyncrl.bench.overlap.side_run JSON

is the process of a side that runs in real time. JSON: the fields of SideRequest.
"""

import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import structlog

from asyncrl.algorithms.algorithm_by_name import advantages_of, algorithm_of
from asyncrl.bench.measured_runs import environment, run_program, train, write_empty_model
from asyncrl.bench.overlap.accounting import Overlap, overlap_of
from asyncrl.bench.overlap.timed_services import StageTimes, Update, timed_services
from asyncrl.concurrency import running_beside
from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.config.toml_writer import dump
from asyncrl.controller.controller import Controller
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.observers.recorder import Recorder
from asyncrl.controller.training_run import WorkerEvents
from asyncrl.deploy.report.run_record import read_run
from asyncrl.deploy.report.worker_trace import read_trace
from asyncrl.errors import ConfigError
from asyncrl.fleet.fleet import Platform, RunningFleet, ServiceSpec, fleet_on
from asyncrl.fleet.launching.launcher import InprocLauncher
from asyncrl.fleet.worker.worker_runtime import Instruments
from asyncrl.fleet.worker.worker_spec import RunFacts, WorkerSpec
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.simulation.fakes.fake_service import now
from asyncrl.simulation.virtual_loop import run
from asyncrl.telemetry.run_directory import RunDirectory, open_run_directory
from asyncrl.telemetry.state_clock import StateClock
from asyncrl.telemetry.trace import Tracer

# Runs timed stages under the real controller on the virtual clock, and leaves a run directory as a real run does.
#
# controller ── the real handles, connections and codec ── in-process wire ── workers with timed stages
#     └── the real recorder: metrics.jsonl      workers ── the real state clock and tracer: logs/*.trace.jsonl


def run_on_virtual_clock(config: Config, services: Mapping[str, ServiceSpec], path: Path) -> RunDirectory:
    """Trains to the last step and returns the run directory. The collector of garbage is off meanwhile."""
    directory = open_run_directory(path)
    directory.config.write_text(dump(config))
    gc.collect()
    gc.disable()
    try:
        run(_train(config, services, directory))
    finally:
        gc.enable()
    return directory


async def _train(config: Config, services: Mapping[str, ServiceSpec], directory: RunDirectory) -> None:
    unrecorded = config.telemetry.model_copy(update={"samples_per_step": 0})
    config = config.model_copy(update={"telemetry": unrecorded})
    wire = InprocWire()
    names = iter(range(1 << 32))
    launcher = InprocLauncher(wire, wire, _instruments)
    platform = Platform(wire, lambda _: launcher, lambda: f"{next(names):08x}", lambda _: None)
    facts = RunFacts("feedbeef", directory.path, directory.path, 0, "none", config)
    starting = fleet_on(platform, list(services.values()), facts, report=lambda _: None, resume="the same")
    async with starting as fleet:
        recorder = Recorder(directory, fleet.fleet, fleet.health_poller.poll, 0, lambda metrics, sample: None)
        with closing(recorder):
            controller = _controller(config, fleet, recorder)
            beside = {"recorder": recorder.run(), "worker events": WorkerEvents(fleet, controller).follow()}
            async with running_beside(beside):
                await controller.run(algorithm_of(config))
                await recorder.drain()


def _controller(config: Config, fleet: RunningFleet, recorder: Recorder) -> Controller:
    async def nothing(version: int) -> None:
        """Makes no checkpoint."""

    return Controller(
        Gate(GateConfig.of(config)),
        Journal(MemoryStore()),
        fleet.fleet,
        lambda group: (f"prompt {group}", {}),
        config,
        advantages_of(config),
        between=nothing,
        observe=recorder.observe,
        kill=fleet.supervisor.kill,
    )


@contextmanager
def _instruments(spec: WorkerSpec) -> Iterator[Instruments]:
    """Opens instruments on virtual time; only the trace is written."""
    trace = spec.facts.run_dir / "logs" / f"{spec.instance}.trace.jsonl" if spec.facts.config.telemetry.trace else None
    log = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger("CRITICAL"))
    with closing(Tracer(trace, f"{spec.service}{spec.replica}.{spec.rank}", now, now)) as tracer:
        yield Instruments(StateClock(now), tracer, log)


# Names the sides of a comparison, and the keys of the config in which each differs from the experiment.


Engine = Literal["real", "emulated", "virtual"]
ONE_STEP_OFF = "one-step-off"


@dataclass(frozen=True, slots=True)
class Side:
    """One side. values: keys of the config. is_baseline: whether speed-ups are over it; the first such side has the
    same number of threads as the asynchronous sides. update: of timed generators."""

    name: str
    values: dict[str, Any]
    is_baseline: bool = False
    update: Update = "in flight"


def sides_of(engine: Engine, limits: Sequence[int]) -> list[Side]:
    """Returns all sides, baselines first: a real synchronous run may use all cores for each stage, so it is measured
    with one thread a worker and with as many as there are cores."""
    return [*_baselines(engine), *_asynchronous(limits)]


def _baselines(engine: Engine) -> Iterator[Side]:
    synchronous = {"staleness.limit": 0}
    if engine != "real":
        yield Side("synchronous", synchronous, is_baseline=True)
        return
    yield Side("synchronous, 1 thread", synchronous | {"fleet.threads": 1}, is_baseline=True)
    if (cores := os.cpu_count() or 1) > 1:
        yield Side(f"synchronous, {cores} threads", synchronous | {"fleet.threads": cores}, is_baseline=True)


def _asynchronous(limits: Sequence[int]) -> Iterator[Side]:
    # Whole batches, each sampled by one version while the batch before it trains.
    yield Side(ONE_STEP_OFF, {"staleness.limit": 1, "staleness.policy": "block"}, update="drain")
    for limit in limits:
        yield Side(f"limit {limit}", {"staleness.limit": limit})


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
    """Says what to run. experiment: name or file; flags, values: keys over it. times: of timed stages."""

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
    """Returns the config of a side. Raises ConfigError for mistakes, and for what timed stages cannot be."""
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
    assert request.times is not None, "the command gives the times of timed stages"
    times = replace(StageTimes.of(request.times), slots=config.generation.slots)
    values = config.model_dump(mode="json")
    values["algorithm"]["kl"] = 0.1 if times.reference else 0.0
    services = timed_services(times, config.generation.replicas)
    if request.engine == "virtual":
        run_on_virtual_clock(load(None, (), values=values).config, services, path)
    else:
        run_in_processes(values, services, path)


if __name__ == "__main__":
    _run_here(SideRequest(**json.loads(sys.argv[1])))
