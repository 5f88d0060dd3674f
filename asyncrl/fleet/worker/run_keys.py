"""Keys of the processes of a run on TCP: workers share a pair, and the controller has one that it keeps.

    controller ── its pair ──> control and work lanes of every worker, which accept no other key
    worker ── shared pair ──> rows and weights of every worker

So a worker, also one on a host that joined, can read what the run trains on, and can call no other worker.
"""

from dataclasses import replace

from asyncrl.fleet.worker.worker_spec import RunFacts, WorkerSpec
from asyncrl.lanes.control.auth import CurveKeys


def controller_keys(facts: RunFacts) -> tuple[CurveKeys | None, RunFacts]:
    """Returns the keys with which the controller calls workers, and the facts with the public one for workers."""
    if facts.curve is None:
        return None, facts
    shared = CurveKeys(*facts.curve)
    if facts.config.fleet.wire != "tcp":  # On ipc whoever is called learns the password of the caller.
        return shared, facts
    own = CurveKeys.fresh()
    return replace(own, server=shared.public), replace(facts, caller=own.public)


def worker_keys(spec: WorkerSpec) -> CurveKeys | None:
    """Returns the keys of a worker, with those that it accepts at each of its addresses."""
    facts = spec.facts
    if facts.curve is None:
        return None
    public, secret = facts.curve
    if not facts.caller:
        return CurveKeys(public, secret)
    callers = {address: (facts.caller,) for address in (spec.addresses.control, spec.addresses.work)}
    return CurveKeys(public, secret, admitted=(public, facts.caller), admitted_at=callers)
