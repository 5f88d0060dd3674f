"""The specification that starts a worker, and its one line of JSON on the way to the worker's process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import TypeAdapter

from asyncrl.config.placement import COMPUTING
from asyncrl.config.schema import Config
from asyncrl.config.sections.secret import REVEALING, veiled
from asyncrl.lanes.control.auth import with_key
from asyncrl.protocols.messages import PROTOCOL, Hello
from asyncrl.protocols.rank_layout import Layout
from asyncrl.version import __version__

Implementation: TypeAlias = str | Callable[..., Any]
"""Names the service of a worker: "module:Class", or inside this process a callable that gets its WorkerContext."""

Origin = Literal["plain", "torch", "spawn"]
"""The process that a worker is forked from, where `fleet.start` allows a fork: a copy of one that has imported what
every worker needs ("plain"), a copy of one that has imported torch and transformers as well ("torch"), or a fresh
Python ("spawn"), for services whose engine starts threads or uses a GPU when it is imported."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts that all workers of a run share.

    run: hex digits that name shared memory and sockets of this start only. run_dir, model_dir: absolute paths.
    checkpoint_dir: what the run resumes from, None at its first start. weights_arena: name of the shared memory for
    published weights. curve: public and secret key that all processes share, None on TCP. caller: public key of the
    controller on TCP, where each worker has a pair of its own; "": they share that one. heartbeat: seconds between
    heartbeats on every connection, for peers on other hosts, whose death no local kernel reports. shared_rows: whether
    there is enough shared memory for rows, which are sent as frames otherwise. linked_as: incarnation that all hellos
    of this start name, because connections outlive a return to a checkpoint; None: `incarnation`, before the first one.
    secret_paths: of this host, which no code of the user sees, beside those that the config names.
    """

    run: str
    run_dir: Path
    model_dir: Path
    incarnation: int
    weights_arena: str
    config: Config
    checkpoint_dir: Path | None = None
    curve: tuple[str, str] | None = field(default=None, repr=False)
    caller: str = ""
    heartbeat: float | None = None
    shared_rows: bool = True
    linked_as: int | None = None
    secret_paths: tuple[str, ...] = ()

    @property
    def _link(self) -> int:
        return self.incarnation if self.linked_as is None else self.linked_as

    def hello(self, service: str, rank: int, instance: str) -> Hello:
        """Returns the hello that a worker or the controller sends on a new connection."""
        return Hello(self.run, self._link, service, rank, instance, PROTOCOL, __version__)

    def renewed(self, incarnation: int, checkpoint_dir: Path) -> "RunFacts":
        """Returns the facts of a later incarnation, which goes on from a checkpoint in the same start of the run."""
        arena = weights_arena(self.run, incarnation)
        now = replace(self, incarnation=incarnation, linked_as=self._link)
        return replace(now, weights_arena=arena, checkpoint_dir=checkpoint_dir)


def weights_arena(run: str, incarnation: int) -> str:
    """Returns the name of the shared memory for published weights."""
    return f"asyncrl-{run}-{incarnation}-weights"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of one instance: a socket for each lane and one for rows."""

    control: str
    work: str
    data: str

    @classmethod
    def inproc(cls, instance: str) -> Self:
        return cls(*(f"inproc://{instance}.{lane}" for lane in ("control", "work", "data")))


NOT_BOUND = Addresses("", "", "")
"""Addresses of an instance before its launcher, where the worker runs, has chosen them."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Specification of one instance of a worker. instance: a name that is never used twice.

    implementation: "module:Class"; for a worker inside this process also a callable that makes the service from its
    context. options: plain values for this service. origin: what its process is forked from. devices: that this worker
    alone of its service has; none: what the config says. curve: public and secret key of this instance alone; None:
    those that workers share. guest: a second worker that runs in the process of this one.
    """

    service: str
    replica: int
    rank: int
    layout: Layout
    instance: str
    implementation: Implementation
    addresses: Addresses
    facts: RunFacts
    options: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin = "plain"
    devices: tuple[str, ...] = ()
    curve: tuple[str, str] | None = field(default=None, repr=False)
    guest: "WorkerSpec | None" = None

    @property
    def hello(self) -> Hello:
        return self.facts.hello(self.service, self.rank, self.instance)

    def reached_at(self, lane: str) -> str:
        """Returns the address at which others reach a lane, with the public key of the instance where it has one."""
        address: str = getattr(self.addresses, lane)
        return address if self.curve is None else with_key(address, self.curve[0])

    @property
    def device(self) -> str:
        """Returns the device of the worker, as its specification or else the config says; "cpu" where neither does."""
        section = getattr(self.facts.config, "generation" if self.service == "evaluation" else self.service, None)
        return self.devices[0] if self.devices else getattr(section, "device", "cpu")

    def on_own_device(self) -> "WorkerSpec":
        """Returns the specification with the first of its devices as that of its service in the config."""
        name = "generation" if self.service == "evaluation" else self.service
        if not self.devices or name not in COMPUTING:
            return self
        config = self.facts.config
        section = getattr(config, name).model_copy(update={"device": self.devices[0]})
        return replace(self, facts=replace(self.facts, config=config.model_copy(update={name: section})))

    def to_json(self) -> str:
        """Returns the one line that a worker process reads first, with the secrets of the config."""
        return _json_adapter().dump_json(self, context={REVEALING: True}).decode()

    def without_secrets(self) -> str:
        """Returns the line as others may read it."""
        bare = replace(self, curve=None, facts=replace(self.facts, curve=None), options=veiled(self.options))
        return _json_adapter().dump_json(bare).decode()

    @classmethod
    def from_json(cls, line: str | bytes) -> "WorkerSpec":
        return _json_adapter().validate_json(line)


@cache
def _json_adapter() -> TypeAdapter[WorkerSpec]:
    return TypeAdapter(WorkerSpec)
