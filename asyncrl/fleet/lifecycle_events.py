"""Everything that a fleet reports about its workers, as one union of events."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _WorkerEvent:
    service: str
    instance: str


class WorkerSpawned(_WorkerEvent):
    """A process of an instance was started; the instance does not take calls yet."""


class WorkerStarted(_WorkerEvent):
    """The instance takes calls from now on."""


@dataclass(frozen=True, slots=True)
class WorkerLost(_WorkerEvent):
    """The instance takes no more calls, and its outstanding calls fail. Its process may still be ending, and it may
    have died before it took any call. has_left: it, or its host, was asked to leave, so nothing killed it.
    is_drained: and no group lost anything by that."""

    reason: str
    has_left: bool = False
    is_drained: bool = False


@dataclass(frozen=True, slots=True)
class WorkerCleanedUp(_WorkerEvent):
    """The process of the instance was waited for, and what it left was removed: it holds nothing any more.
    host_is_gone: it was lost with its host, so that it did not die of what it did."""

    host_is_gone: bool = False


@dataclass(frozen=True, slots=True)
class OfferDropped(_WorkerEvent):
    """A new worker, whose name is in place of an instance, is not started any more: START_TRIES of its
    instances in a row could not start. reason: why the last one could not."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorkerHung(_WorkerEvent):
    """The instance is alive and has answered no call, not even for its health, for `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerStuck(_WorkerEvent):
    """The instance answers about its health, but it has made no progress with its calls for the deadline of one."""

    reason: str


@dataclass(frozen=True, slots=True)
class FleetStalled:
    """No worker has answered a call for a while. description: what each worker does, as text of several lines."""

    description: str


@dataclass(frozen=True, slots=True)
class CallsWait:
    """Calls wait long in the queue of a worker that makes progress. description: one line."""

    description: str


FleetEvent = (
    WorkerSpawned
    | WorkerStarted
    | WorkerLost
    | WorkerCleanedUp
    | OfferDropped
    | WorkerHung
    | WorkerStuck
    | FleetStalled
    | CallsWait
)
