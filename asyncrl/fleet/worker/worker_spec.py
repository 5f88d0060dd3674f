"""What starts a worker: its specification, and the seam between the supervisor and processes, tasks or clusters."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, Self

from asyncrl.config import Config
from asyncrl.protocols.layout import Layout

if TYPE_CHECKING:
    from asyncrl.service import Service, WorkerContext

    Implementation = str | Callable[[WorkerContext], Service]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What all workers of a run know.

    run: hex digits, of this start only, that name its shared memory and sockets. run_dir, model_dir: absolute.
    checkpoint_dir: what the run resumes from, None at its first start. weights_arena: name of the shared memory that
    new weights are published in. curve: public and secret key of the run's sockets. heartbeat: seconds between signs
    of life on every link, for peers on other hosts, of whose death no kernel tells.
    """

    run: str
    run_dir: str
    model_dir: str
    epoch: int
    weights_arena: str
    config: Config
    checkpoint_dir: str | None = None
    curve: tuple[str, str] | None = None
    heartbeat: float | None = None


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where one instance listens: a socket a lane, and one for rows."""

    control: str
    work: str
    data: str


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One instance of one worker. instance: never used twice.

    implementation: "module:Class"; or, for a worker in this very process, what makes the service from its context.
    options: keyword values of this service, plain ones.
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

    def to_json(self) -> str:
        """One line; what a worker process reads first."""
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
    """Its fields, as they are."""
    return {item.name: getattr(record, item.name) for item in fields(record)}


class WorkerProcess(Protocol):
    """A started worker. `pid` is this process's own for a worker inside it."""

    pid: int

    async def wait(self) -> str:
        """Returns once it is dead, with how it ended ("killed by SIGKILL"). May be awaited again and again."""
        ...

    def stop(self) -> None:
        """Ask it to finish."""
        ...

    def terminate(self) -> None:
        """Tell it to end, for one that does not listen any more."""
        ...

    def kill(self) -> None:
        """End it, with no chance to say goodbye."""
        ...


class Launcher(Protocol):
    """Starts workers: as processes (deploy/local.py) or inside this one (inproc_launcher.py)."""

    def addresses(self, instance: str) -> Addresses:
        """Where an instance of this name shall listen."""
        ...

    def spawn(self, spec: WorkerSpec) -> WorkerProcess: ...

    def bury(self, spec: WorkerSpec) -> None:
        """Remove what a dead instance left behind: shared memory, socket files."""
        ...
