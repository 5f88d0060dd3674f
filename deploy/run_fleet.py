"""Starts the services of a requested run: launches those of this host, waits for workers that join, and chooses the
address of live feedback."""

import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl.concurrency import running_beside
from asyncrl.config.install_hints import program
from asyncrl.config.named_files import code_folders, is_read_by, source_files
from asyncrl.config.placement import ONE_REPLICA, Placement, pool_names, pools_of
from asyncrl.config.schema import Config
from asyncrl.config.sections.runtime_config import FeedbackConfig
from asyncrl.config.sections.secret import Secret, revealed
from asyncrl.controller.controller import Algorithm, PauseSwitch
from asyncrl.controller.observers.inspection import WorkerProfiles
from asyncrl.controller.training_run import OnStep, RunState
from asyncrl.deploy.checks.machine import size_text
from asyncrl.deploy.join_address import join_keys, listen_address
from asyncrl.deploy.preflight import rows_fit
from asyncrl.deploy.process.fork_client import Forks
from asyncrl.deploy.process.interrupts import StopSignals
from asyncrl.deploy.process.local_launcher import LOOPBACK, LocalLauncher
from asyncrl.deploy.process.run_commands import RunCommands, scaled_specs
from asyncrl.deploy.service_specs import device_of, service_specs
from asyncrl.errors import ConfigError
from asyncrl.fleet.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.fleet.launching.join_point import JoinPoint, Places, open_join_point
from asyncrl.fleet.launching.joining import REQUEST_BYTES
from asyncrl.fleet.launching.launcher import new_start
from asyncrl.fleet.launching.run_access import RunWatch, open_commands
from asyncrl.fleet.lifecycle_events import FleetEvent
from asyncrl.fleet.weight_transport import transport_of
from asyncrl.fleet.worker.worker_spec import RunFacts, weights_arena
from asyncrl.lanes.bound_socket import bound_socket, host_of, on_tcp
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.data.file_cache import FileServer, OfferedFiles
from asyncrl.lanes.data.row_file import READY_ROWS
from asyncrl.lanes.shared_memory import unlink_abandoned
from asyncrl.lanes.weights.version_folder import folder_of_start
from asyncrl.tasks.row_files import Rows
from asyncrl.telemetry.display import Display
from asyncrl.telemetry.run_directory import RunDirectory

# A run as its caller wants it: config, directory, and Python objects in place of what the config names.


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run that the user requests.

    command: resumes the run. places: where the values of keys come from. prompts, algorithm, services: Python objects
    that replace those of the config, such as rewards in this process. on_step: takes the metrics of each step, and
    returns whether the run shall end. forks: what workers are forked from, if it was started already. store: address
    that gets a copy of the run after each checkpoint, "" for none. is_call: a program calls, which gets an error of its
    own code as it is; else it is an end of the run like any other.
    """

    config: Config
    run_dir: Path
    display: Display
    command: str
    accept_changes: bool = False
    places: Mapping[str, str] = field(default_factory=dict)
    prompts: Rows | None = None
    algorithm: Algorithm | None = None
    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    forks: Forks | None = None
    store: str = ""
    on_step: OnStep | None = None
    is_call: bool = False


LONGEST = "longest_prompts.jsonl"
"""File in the run's logs with the prompts whose tokens are counted before anything is trained."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")
"""Endings of files of a model that workers do not read who need its tokenizer only."""
PRETRAIN = "pretrain.jsonl"
"""File in the run's logs with the texts that the trainer learns besides its samples."""

HEARTBEAT = 10.0
"""Seconds between heartbeats. Three missing ones mean that a worker's host is gone; loading a model takes less."""


def facts_of(config: Config, directory: RunDirectory, model: Path, state: RunState) -> RunFacts:
    """Names a new start of the run and returns what its workers share."""
    folder = config.weights.folder if transport_of(config).facts.in_folder else None
    start = new_start(directory, folder)
    keys = CurveKeys.fresh()
    return RunFacts(
        run=start,
        run_dir=directory.path,
        model_dir=model.absolute(),
        incarnation=state.incarnation,
        weights_arena=weights_arena(start, state.incarnation),
        config=config,
        checkpoint_dir=Path(state.plan.directory) if state.plan else None,
        curve=(keys.public, keys.secret),
        heartbeat=HEARTBEAT if config.fleet.wire == "tcp" else None,
        shared_rows=rows_fit(config, model),
    )


@asynccontextmanager
async def run_fleet(
    request: RunRequest, facts: RunFacts, signals: StopSignals, scorers: Mapping[str, Path], pauses: PauseSwitch
) -> AsyncIterator[RunningFleet]:
    """Starts the services of the run. scorers: folders of scoring models by service. pauses: turned by commands."""
    if freed := unlink_abandoned():
        request.display.say(f"removed {size_text(freed)} of shared memory that a run left whose processes were killed")
    config = request.config
    logs = facts.run_dir / "logs"
    options: dict[str, dict[str, Any]] = {name: {"model": str(folder)} for name, folder in scorers.items()}
    options["generation"] = {"longest_prompts": str(logs / LONGEST)}
    options["training"] = {"pretrain": str(logs / PRETRAIN)}
    if config.feedback.asks:
        address = feedback_address(config.feedback, RunDirectory(facts.run_dir))
        options["reward"] = {**options.get("reward", {}), **address.options}
        request.display.say(f"answers wait for your rating at {address.url}")
    async with AsyncExitStack() as scope:
        if transport_of(config).facts.in_folder:  # Workers that were killed left theirs.
            folder = folder_of_start(config.weights.folder, facts.run_dir, facts.run)
            scope.callback(shutil.rmtree, folder, ignore_errors=True)
        launcher = None
        if config.fleet.wire != "inproc":
            host = host_of(listen_address(config)) if config.fleet.listen else LOOPBACK
            launcher = scope.enter_context(LocalLauncher(facts.run, config.fleet.wire, request.forks, host))
            signals.hurry = launcher.hurry
        directory = RunDirectory(facts.run_dir)
        specs = list(scaled_specs(list(_specs(request, options)), directory.scaled, request.display.say))
        join_point = await scope.enter_async_context(_join_point(specs, facts, scorers, request.display))
        request.display.say(f"starting {', '.join(spec.name for spec in specs)}")
        report = request.display.say
        running = await scope.enter_async_context(
            running_fleet(specs, facts, launcher=launcher, join_point=join_point, report=report, resume=request.command)
        )
        if join_point is not None:
            join_point.retire = partial(_retire, running, signals)
        for worker in chain.from_iterable(running.workers.values()):
            if worker.alive:
                request.display.note("WorkerStarted", instance=worker.instance)
        running.subscribers.append(partial(_note_worker, request.display))
        running.is_paused = lambda: pauses.on
        if launcher is not None:
            await scope.enter_async_context(_commands(running, launcher, pauses, signals, request.display))
        yield running


def _retire(running: RunningFleet, signals: StopSignals, instance: str, seconds: float) -> bool:
    """Drains an instance whose host leaves, and returns whether it runs. The run ends with a checkpoint instead when it
    cannot go on without the instance."""
    slots = (each.slot for each in running.supervisor.instances.values() if each.spec.instance == instance)
    if (slot := next(slots, None)) is not None and not slot.restart and signals.end_in_order():
        return True
    return running.supervisor.retire(instance, seconds)


def _commands(
    running: RunningFleet, launcher: LocalLauncher, pauses: PauseSwitch, signals: StopSignals, display: Display
) -> AbstractAsyncContextManager[None]:
    """Takes commands beside the sockets of workers, or where workers join."""
    directory = RunDirectory(running.facts.run_dir)
    listens = running.facts.config.fleet.listen
    address = on_tcp(launcher.host, "*") if listens else f"ipc://{launcher.sockets}/controller.commands"
    profiles = WorkerProfiles(running.health_poller, directory.profiles)
    replicas = {spec.name: spec.replicas for spec in service_specs(running.facts.config)}
    commands = RunCommands(running, profiles, pauses, signals, display, replicas)
    return open_commands(directory.commands, address, commands.run)


def _specs(request: RunRequest, options: Mapping[str, Mapping[str, Any]]) -> Iterator[ServiceSpec]:
    joined = request.config.fleet.joined
    for wanted in service_specs(request.config):
        spec = request.services.get(wanted.name, wanted)
        if spec.here and spec.name in joined:
            raise ConfigError(f"fleet.joined: {spec.name} is a Python object of this process, which no worker can join")
        merged = {**spec.options, **options.get(spec.name, {})}
        yield replace(spec, options=merged, joined=joined.get(spec.name, 0))


@asynccontextmanager
async def _join_point(
    specs: list[ServiceSpec], facts: RunFacts, scorers: Mapping[str, Path], display: Display
) -> AsyncIterator[JoinPoint | None]:
    """Listens for workers that join, if the config says that some do."""
    config = facts.config
    if not config.fleet.joined:
        yield None
        return
    keys = join_keys(config, facts.run_dir)
    pools = pools_of(config)
    names = pool_names(config)
    placed = Placement.of(config).workers
    places = {}
    offered = {}
    for spec in specs:
        if spec.joined:
            packages = ("asyncrl",) if spec.origin == "plain" else ("asyncrl", "torch", "transformers")
            offered[spec.name] = list(offered_files(spec.name, facts, scorers))
            key = keys.path / f"{spec.name}.key"
            command = f"{program()} join {spec.name} --to {config.fleet.listen} --key {key}"
            pool = pools.get(names.get(spec.name, ""))
            hosts = tuple(each.host for each in placed.get(spec.name, ()))
            places[spec.name] = Places(spec.joined, packages, command, pool, device_of(config, spec), hosts)
    point = JoinPoint(
        listen_address(config),
        places,
        keys.role_of,
        deadline=config.fleet.join_deadline,
        report=display.say,
        files=FileServer(offered),
        watch=RunWatch(RunDirectory(facts.run_dir), keys.role_of).watch,
    )
    with closing(ZmqWire(keys.controller_keys(), REQUEST_BYTES)) as wire:
        async with running_beside({"admitted keys": keys.follow()}), open_join_point(point, wire):
            yield point


def offered_files(service: str, facts: RunFacts, scorers: Mapping[str, Path]) -> Iterator[OfferedFiles]:
    """Yields the files that a worker of a service reads. Trainer and critics write into the run directory as it is of
    this start, which another folder with the same config is not."""
    if service in ONE_REPLICA:
        yield OfferedFiles(facts.run_dir, "shared", ("config.toml", RunDirectory(facts.run_dir).start.name))
    else:
        yield OfferedFiles(facts.run_dir, "run", ("config.toml",))
    whole = service in ("generation", "evaluation", "reference", *ONE_REPLICA)
    yield OfferedFiles(facts.model_dir, "folder", left_out=() if whole else WEIGHT_FILES)
    if service == "generation":
        yield OfferedFiles(facts.run_dir / "logs", "files", (LONGEST,))
        if facts.checkpoint_dir is not None:
            yield OfferedFiles(facts.checkpoint_dir, "folder", (READY_ROWS,))
    if service in scorers:
        yield OfferedFiles(scorers[service], "folder")
    folders = code_folders(facts.config, service)
    read = {path.expanduser().resolve() for key, path in source_files(facts.config) if is_read_by(key, service)}
    for folder, by_file in folders.items():
        real = folder.resolve()
        if names := tuple(sorted(path.relative_to(real).as_posix() for path in read if path.is_relative_to(real))):
            yield OfferedFiles(folder, "files" if by_file else "module", names)


def _note_worker(display: Display, event: FleetEvent) -> None:
    """Notes what happens to workers in the controller's log."""
    display.note(type(event).__name__, **{name: str(value) for name, value in asdict(event).items()})


@dataclass(frozen=True, slots=True)
class FeedbackAddress:
    """The address of the page. key: lets whoever has it read and rate answers."""

    host: str
    port: int
    key: Secret

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/?key={self.key.value}"

    @property
    def options(self) -> dict[str, object]:
        """Returns the options of the service that serves the page."""
        return asdict(self)


def feedback_address(config: FeedbackConfig, directory: RunDirectory) -> FeedbackAddress:
    """Returns the address of this start; writes it to feedback.json, which only this user can read. Values that the
    config leaves open are those of the start before, if the port is still free. Raises ConfigError when the port that
    the config names is taken."""
    before = _before(directory)
    key = config.key.value or before.get("key") or secrets.token_urlsafe(16)
    address = FeedbackAddress(config.host, _free_port(config, before.get("port", 0)), Secret(str(key)))
    fresh = directory.feedback.with_suffix(".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(json.dumps(revealed(asdict(address)) | {"url": address.url}) + "\n")
    fresh.replace(directory.feedback)
    return address


def _before(directory: RunDirectory) -> dict[str, object]:
    try:
        said = json.loads(directory.feedback.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _free_port(config: FeedbackConfig, before: object) -> int:
    if config.port == 0 and isinstance(before, int) and before:
        try:
            return _bindable(config.host, before)
        except ConfigError:
            pass
    return _bindable(config.host, config.port)


def _bindable(host: str, port: int) -> int:
    with closing(bound_socket(host, port, "feedback.port")) as bound:
        return int(bound.getsockname()[1])
