"""Keys of the processes of a run. On TCP each instance of a worker has a pair of its own, made by the controller.

    controller ── its pair ──> control and work lanes of every worker, which accept no other key
    worker ── its pair ──> rows and weights of those workers that admit its role (lane_access.py)

On ipc, which no other user can read, all processes share one pair as a password.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from asyncrl.fleet.worker.worker_spec import RunFacts, WorkerSpec
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.zmq_wire import ZmqWire

Admit = Callable[[Mapping[str, Sequence[Sequence[str]]]], None]
"""Takes the public keys that may call each lane of a worker from now on, and those that may no more."""


def controller_keys(facts: RunFacts) -> tuple[CurveKeys | None, RunFacts]:
    """Returns the keys with which the controller calls workers, and the facts for workers: on TCP with its public key
    and without the pair that processes share on ipc."""
    if facts.curve is None:
        return None, facts
    if facts.config.fleet.wire != "tcp":  # On ipc whoever is called learns the password of the caller.
        return CurveKeys(*facts.curve), facts
    own = CurveKeys.fresh()
    return own, replace(facts, curve=None, caller=own.public)


def pair_of_instance(facts: RunFacts) -> tuple[str, str] | None:
    """Makes the pair of an instance; None where all processes share one."""
    if not facts.caller:
        return None
    fresh = CurveKeys.fresh()
    return fresh.public, fresh.secret


def worker_keys(spec: WorkerSpec) -> CurveKeys | None:
    """Returns the keys of a worker, with those that it accepts at each of its addresses until it is told of others."""
    facts = spec.facts
    if spec.curve is None:
        return None if facts.curve is None else CurveKeys(*facts.curve)
    here = spec.addresses
    callers = {each: (facts.caller,) for each in (here.control, here.work, here.data, weights_address(spec))}
    return CurveKeys(*spec.curve, admitted=(facts.caller,), admitted_at=callers, in_addresses=True)


def weights_address(spec: WorkerSpec) -> str:
    """Returns where a worker on TCP listens for readers of weights, on a port that the system chooses."""
    return f"{spec.addresses.data.rpartition(':')[0]}:*"


def admit_on(wire: ZmqWire, spec: WorkerSpec) -> Admit:
    """Returns what has the listeners of a worker accept other callers."""
    addresses = {"data": spec.addresses.data, "weights": weights_address(spec)}

    known: dict[str, set[str]] = {lane: set() for lane in addresses}

    def admit(changes: Mapping[str, Sequence[Sequence[str]]]) -> None:
        for lane, (came, gone) in changes.items():
            if lane in known:
                known[lane] = known[lane].union(came).difference(gone)
                wire.admit((spec.facts.caller, *known[lane]), addresses[lane])

    return admit
