"""Everything that a fleet reports about its workers, as one union of events."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerSpawned:
    """A process of an instance was started; the instance does not take calls yet."""

    service: str
    instance: str


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """The instance takes calls from now on."""

    service: str
    instance: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The instance takes no more calls, and its outstanding calls fail. Its process may still be ending, and it may
    have died before it took any call."""

    service: str
    instance: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerCleanedUp:
    """The process of the instance was waited for, and what it left was removed: it holds nothing any more."""

    service: str
    instance: str


@dataclass(frozen=True, slots=True)
class WorkerHung:
    """The instance is alive and has answered no call, not even for its health, for `seconds`."""

    service: str
    instance: str
    seconds: float


@dataclass(frozen=True, slots=True)
class FleetStalled:
    """No worker has answered a call for a while. description: what each worker does, as text of several lines."""

    description: str


FleetEvent = WorkerSpawned | WorkerStarted | WorkerLost | WorkerCleanedUp | WorkerHung | FleetStalled
