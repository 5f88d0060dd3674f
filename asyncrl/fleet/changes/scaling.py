"""Changes the number of workers of a service while the run goes on.

more    parked workers are wanted again, then new ones are added: they start like restarted ones
fewer   workers that do not run, then those with the highest numbers, are parked: they drain first
"""

from collections.abc import Mapping

from asyncrl.errors import Refused
from asyncrl.fleet.fleet import RunningFleet, ServiceSpec

MOST_WORKERS = 1000
"""Workers of one service: as many as a fleet was tried with, and fewer than a slip of the finger asks for."""

DRAIN = 60.0
"""Seconds for a worker to finish what it has: nobody waits for its end, unlike that of a host."""


def scale(running: RunningFleet, service: str, count: int) -> str:
    """Makes `count` workers of a service run; returns what happens. Raises Refused for what cannot be."""
    spec = scalable(running.specs, service, count)
    supervisor = running.supervisor
    slots = supervisor.slots_of(service)
    wanted = [slot for slot in slots if slot.wanted.is_set()]
    parked = [slot for slot in slots if not slot.wanted.is_set()][: max(0, count - len(wanted))]
    for slot in parked:
        slot.wanted.set()
    new = [f"{service}{number}.0" for number in range(len(slots), len(slots) + count - len(wanted) - len(parked))]
    for _ in new:
        running.add_replica(service)
    surplus = sorted(wanted, key=lambda slot: (slot.worker.alive, -slot.worker.replica))[: max(0, len(wanted) - count)]
    for slot in surplus:
        supervisor.park(slot, DRAIN)
    changes = [f"{service} has places for {count} workers" if spec.joined else f"{service}: {len(wanted)} -> {count}"]
    if starting := [slot.worker.name for slot in parked] + new:
        changes.append(f"{', '.join(starting)} {'may join' if spec.joined else 'start'}")
    if surplus:
        names = ", ".join(slot.worker.name for slot in surplus)
        changes.append(f"{names} end with what they have, within {DRAIN:g} s")
    return "; ".join(changes)


def scalable(specs: Mapping[str, ServiceSpec], service: str, count: int) -> ServiceSpec:
    """Returns the spec of a service that may have so many workers. Raises Refused."""
    able = [name for name, spec in specs.items() if _may_scale(spec)]
    listed = f"The services that may are {', '.join(able)}"
    if service not in specs:
        raise Refused(f"this run has no service {service!r} whose number of workers could change. {listed}")
    spec = specs[service]
    if not spec.restart:
        raise Refused(
            f"the number of {service} workers does not change while a run goes on, because each has a part of a model "
            f"or of what is learnt. Stop the run, and resume it with another {service}.layout. {listed}"
        )
    if not _may_scale(spec):
        raise Refused(f"{service} has one worker in this run, which no other one can stand in for. {listed}")
    if not 1 <= count <= MOST_WORKERS:
        raise Refused(f"{service}={count} is out of range: write 1 to {MOST_WORKERS}")
    if spec.devices and count > len(spec.devices):
        raise Refused(
            f"{service}={count} needs a GPU for each worker, and the pool of {service} has room for "
            f"{len(spec.devices)}: stop the run, and resume it with more devices in the pool"
        )
    return spec


def _may_scale(spec: ServiceSpec) -> bool:
    return spec.restart and spec.scales and not spec.here and spec.layout.size == 1
