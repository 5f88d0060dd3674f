"""The specification that starts a worker, and its one line of JSON on the way to the worker's process."""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Self

from asyncrl import __version__
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.protocols.layout import Layout
from asyncrl.protocols.messages import PROTOCOL, Hello

if TYPE_CHECKING:
    from asyncrl.fleet.worker.service import Service, WorkerContext

    Implementation = str | Callable[[WorkerContext], Service]


Origin = Literal["plain", "torch", "spawn"]
"""The process that a worker is forked from, where `fleet.start` allows a fork: a copy of one that has imported what
every worker needs ("plain"), a copy of one that has imported torch and transformers as well ("torch"), or a fresh
Python ("spawn"), for services whose engine starts threads or uses a GPU when it is imported."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts that all workers of a run share.

    run: hex digits that name shared memory and sockets of this start only. run_dir, model_dir: absolute paths.
    checkpoint_dir: what the run resumes from, None at its first start. weights_arena: name of the shared memory for
    published weights. curve: public and secret key of the run's sockets. heartbeat: seconds between heartbeats on every
    connection, for peers on other hosts, whose death no local kernel reports.
    """

    run: str
    run_dir: str
    model_dir: str
    incarnation: int
    weights_arena: str
    config: Config
    checkpoint_dir: str | None = None
    curve: tuple[str, str] | None = None
    heartbeat: float | None = None

    def hello(self, service: str, rank: int, instance: str) -> Hello:
        """Returns the hello that a worker or the controller sends on a new connection."""
        return Hello(self.run, self.incarnation, service, rank, instance, PROTOCOL, __version__)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of one instance: a socket for each lane and one for rows."""

    control: str
    work: str
    data: str

    @classmethod
    def inproc(cls, instance: str) -> Self:
        return cls(*(f"inproc://{instance}.{lane}" for lane in ("control", "work", "data")))


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Specification of one instance of a worker. instance: a name that is never used twice.

    implementation: "module:Class"; for a worker inside this process also a callable that makes the service from its
    context. options: plain values for this service. origin: what its process is forked from.
    """

    service: str
    replica: int
    rank: int
    layout: Layout
    instance: str
    implementation: "Implementation"
    addresses: Addresses
    facts: RunFacts
    options: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin = "plain"

    @property
    def hello(self) -> Hello:
        return self.facts.hello(self.service, self.rank, self.instance)

    def to_json(self) -> str:
        """Returns the one line that a worker process reads first."""
        values, facts = _by_name(self), _by_name(self.facts) | {"config": self.facts.config.model_dump(mode="json")}
        layout, addresses = asdict(self.layout), asdict(self.addresses)
        return json.dumps({**values, "facts": facts, "layout": layout, "addresses": addresses})

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        values = json.loads(line)
        facts = values["facts"]
        facts["config"] = Config.model_validate(facts["config"])
        facts["curve"] = tuple(facts["curve"]) if facts["curve"] else None
        layout, addresses = Layout(**values["layout"]), Addresses(**values["addresses"])
        return cls(**{**values, "facts": RunFacts(**facts), "layout": layout, "addresses": addresses})


def _by_name(record: "WorkerSpec | RunFacts") -> dict[str, Any]:
    """Returns the fields by name, without copying them as `asdict` would."""
    return {item.name: getattr(record, item.name) for item in fields(record)}


def load_implementation(implementation: object) -> "Callable[[WorkerContext], Service]":
    """Returns the factory of a service: imports "module:Class", returns a callable as it is.

    Raises:
        ConfigError: there is no such module or class.
    """
    if not isinstance(implementation, str):
        assert callable(implementation), implementation
        return implementation
    module, _, name = implementation.partition(":")
    try:
        made: Callable[[WorkerContext], Service] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"no service {implementation!r}: {error}") from error
    return made
