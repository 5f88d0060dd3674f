"""Runs emulated stages under the real controller on the virtual clock, and leaves a run directory as a real run does.

controller ── the real handles, connections and codec ── in-process wire ── workers with emulated stages
    └── the real recorder: metrics.jsonl      workers ── the real state clock and tracer: logs/*.trace.jsonl
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import structlog

from asyncrl.algorithms.algorithm_by_name import advantages_of, algorithm_of
from asyncrl.concurrency import running_beside
from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import Config
from asyncrl.config.toml_writer import dump
from asyncrl.controller.controller import Controller
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.observers.recorder import Recorder
from asyncrl.controller.training_run import WorkerEvents
from asyncrl.fleet.fleet import Platform, RunningFleet, ServiceSpec, fleet_on
from asyncrl.fleet.launching.launcher import InprocLauncher
from asyncrl.fleet.worker.worker_runtime import Instruments
from asyncrl.fleet.worker.worker_spec import RunFacts, WorkerSpec
from asyncrl.lanes.control.inproc_wire import InprocWire
from asyncrl.simulation.fakes.fake_service import now
from asyncrl.simulation.virtual_loop import run
from asyncrl.telemetry.run_directory import RunDirectory, open_run_directory
from asyncrl.telemetry.state_clock import StateClock
from asyncrl.telemetry.trace import Tracer


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
