"""The hosts of a trial whose workers join: real ends of joining, on machines that come, leave, die and are cut off.

    TrialHosts ── JoiningMachine ── JoiningProcess: JoiningHost ── MachineLauncher ── FaultyProcess, one at a time

Machines outlive the controller, and join the one that resumes the run.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.fleet.launching.join_point import JoinPoint, Places
from asyncrl.fleet.launching.joining_host import JoiningHost
from asyncrl.fleet.worker.worker_spec import Addresses, Implementation, WorkerSpec
from asyncrl.lanes.data.file_cache import FileCache
from asyncrl.lanes.host_id import HostId
from asyncrl.simulation.faults.faulty_platform import FaultyProcess, FaultyWire, ProcessWire
from asyncrl.simulation.faults.trial_plan import Fault

JOIN_ADDRESS = "inproc://join-point"
JOIN_DEADLINE = 300.0
"""Seconds until the needed workers have joined: far longer than any machine is away."""
TIMEOUT = 1e6
"""Seconds without a controller after which a machine gives up: longer than any trial."""
BACK_AFTER = 20.0
"""Seconds after which a machine that left, or a spot machine, comes again."""
SPOT_VISITS = 3
"""Visits of one spot machine."""
VERSIONS = {"asyncrl": "1"}


@dataclass(eq=False)
class JoiningProcess:
    """One process that joins, and those that it started. processes: all of them, also those that ended."""

    joining: JoiningHost
    wire: ProcessWire
    processes: list[FaultyProcess]
    task: asyncio.Task[None]

    def kill(self) -> None:
        """Kills the process with its worker; nothing that their tasks still do has an effect."""
        self.wire.close()
        for process in self.processes:
            process.kill()
        self.task.cancel()


@dataclass(eq=False)
class JoiningMachine:
    """A host, from one boot to the next. host: its identity, another one after each boot."""

    host: HostId
    agents: list[JoiningProcess] = field(default_factory=list)

    @property
    def running(self) -> Iterator[FaultyProcess]:
        return (process for agent in self.agents for process in agent.processes if process.runs)


@dataclass(slots=True)
class MachineLauncher:
    """Starts workers of one agent."""

    hosts: "TrialHosts"
    host: HostId
    processes: list[FaultyProcess] = field(default_factory=list)

    async def spawn(self, spec: WorkerSpec) -> FaultyProcess:
        if others := [process.spec.instance for process in self.processes if process.runs]:
            self.hosts.report(f"{spec.instance} is started on {self.host.name} while {others} still run there")
        if spec.instance in self.hosts.started:
            self.hosts.report(f"{spec.instance} is started a second time, on {self.host.name}")
        self.hosts.started.add(spec.instance)
        factory = self.hosts.factories[spec.service]
        spec = replace(spec, addresses=Addresses.inproc(spec.instance), implementation=factory)
        wire = ProcessWire(self.hosts.wire, self.host.name)
        deaf = self.hosts.chance.random() < 0.2
        process = FaultyProcess(spec, wire, self.host, deaf=deaf, notice=0.0)
        process.task.add_done_callback(lambda _: self.hosts.on_end(spec.instance))
        self.processes.append(process)
        return process

    def clean_up(self, spec: WorkerSpec) -> None:
        """Leaves nothing behind."""


class TrialHosts:
    """All machines of a trial. services: that each of them offers a worker of. factories: make the services of workers
    that start now. on_end: is called with the instance of each worker that ends. report: takes what must not happen."""

    factories: Mapping[str, Implementation]

    def __init__(
        self,
        wire: FaultyWire,
        services: Collection[str],
        seed: str,
        on_end: Callable[[str], None],
        report: Callable[[str], None],
    ) -> None:
        self.wire = wire
        self.chance = random.Random(seed)
        self.on_end = on_end
        self.report = report
        self.started: set[str] = set()
        self._services = services
        self._machines: dict[str, JoiningMachine] = {}
        self._gone: list[JoiningMachine] = []
        self._boots = 0
        self._visits: list[asyncio.Task[None]] = []

    def boot(self, name: str, services: Collection[str] = ()) -> None:
        """Starts a machine, unless it runs, and offers a worker of each of these services, or of all."""
        if name in self._machines:
            return
        self._boots += 1
        self.wire.network.dead.discard(name)
        machine = self._machines[name] = JoiningMachine(HostId(f"{name}-{self._boots}", name=name))
        machine.agents += [self._agent(service, machine) for service in services or self._services]

    def _agent(self, service: str, machine: JoiningMachine) -> JoiningProcess:
        launcher = MachineLauncher(self, machine.host)
        wire = ProcessWire(self.wire, machine.host.name)
        joining = JoiningHost(
            *(wire, JOIN_ADDRESS, service, service, launcher, asyncio.Event()),
            FileCache(Path("/nowhere"), lambda _: None),
            timeout=TIMEOUT,
            say=lambda _: None,
            host=machine.host,
            versions=VERSIONS,
            gpus=[],
        )
        task = asyncio.get_running_loop().create_task(joining.serve(), name=f"{service} on {machine.host.name}")
        task.add_done_callback(self._check_end)
        return JoiningProcess(joining, wire, launcher.processes, task)

    def _check_end(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.report(f"{task.get_name()} ended with {error!r}")

    def join_point(self, specs: Iterable[ServiceSpec]) -> JoinPoint:
        """Returns the controller's end of joining, for those of its services whose workers join."""
        places = {spec.name: Places(spec.joined, VERSIONS, f"join {spec.name}") for spec in specs if spec.joined}
        return JoinPoint(
            JOIN_ADDRESS, places, lambda proof: proof, deadline=JOIN_DEADLINE, report=lambda _: None, versions=VERSIONS
        )

    # ---- what happens to machines

    def change(self, fault: Fault) -> None:
        """Injects a fault of machines or of the network between them."""
        match fault.kind:
            case "host":
                self.kill_host(fault.target, fault.seconds)
            case "partition" | "one-way" as kind:
                self.wire.network.separate(fault.target, fault.peer, fault.seconds, one_way=kind == "one-way")
            case "leave":
                self.leave(fault.target, fault.seconds)
            case "join":
                self.boot(f"late{fault.at}", [fault.target])
            case "spot":
                self.visit(f"spot{fault.at}", fault.target, fault.seconds, fault.count)

    def _host_of(self, service: str) -> str:
        """Returns the name of a machine on which a worker of this service runs, "" without."""
        names = [
            name
            for name, machine in self._machines.items()
            if any(process.spec.service == service for process in machine.running)
        ]
        return self.chance.choice(names) if names else ""

    def kill_one(self, service: str) -> None:
        processes = (process for machine in self._machines.values() for process in machine.running)
        if running := [process for process in processes if process.spec.service == service]:
            self.chance.choice(running).kill()

    def kill_host(self, service: str, seconds: float) -> None:
        """Kills the machine of a worker of this service, with all its processes at once; it boots after `seconds`."""
        if name := self._host_of(service):
            self.lose(name)
            asyncio.get_running_loop().call_later(seconds, self.boot, name)

    def lose(self, name: str) -> None:
        if (machine := self._machines.pop(name, None)) is None:
            return
        self._gone.append(machine)
        self.wire.network.dead.add(name)
        for agent in machine.agents:
            agent.kill()

    def leave(self, name: str, drain: float) -> None:
        """Asks a machine to leave, whose workers get so many seconds to finish; it comes back later."""
        if (machine := self._machines.pop(name, None)) is None:
            return
        self._gone.append(machine)
        _ask_to_leave(machine, drain)
        asyncio.get_running_loop().call_later(drain + BACK_AFTER, self.boot, name)

    def visit(self, name: str, service: str, seconds: float, notice: float) -> None:
        """Lets a spot machine come a few times for so many seconds each. notice: seconds that its workers get to
        finish; 0: it is lost without a word."""
        work = self._visit(name, service, seconds, notice)
        self._visits.append(asyncio.get_running_loop().create_task(work, name=f"visits of {name}"))

    async def _visit(self, name: str, service: str, seconds: float, notice: float) -> None:
        for _ in range(SPOT_VISITS):
            self.boot(name, [service])
            await asyncio.sleep(seconds)
            if notice and name in self._machines:
                _ask_to_leave(self._machines[name], notice)
            await asyncio.sleep(notice)
            self.lose(name)
            await asyncio.sleep(BACK_AFTER)

    def runs(self, instance: str) -> bool:
        machines = (*self._machines.values(), *self._gone)
        return any(process.spec.instance == instance for machine in machines for process in machine.running)

    async def end(self) -> None:
        """Ends all machines, at the end of the trial."""
        for visit in self._visits:
            visit.cancel()
        for name in list(self._machines):
            self.lose(name)
        for machine in self._gone:
            for agent in machine.agents:
                agent.kill()
                await asyncio.wait([agent.task])
                for process in agent.processes:
                    await process.clean_up()
        if self._visits:
            await asyncio.wait(self._visits)


def _ask_to_leave(machine: JoiningMachine, drain: float) -> None:
    for agent in machine.agents:
        agent.joining.drain = drain
        agent.joining.stop.set()
