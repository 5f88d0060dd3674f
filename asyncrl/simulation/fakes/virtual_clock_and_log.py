"""Clock, trace and log of a simulated worker: on virtual time, and nothing is written."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from asyncrl.fleet.worker.worker_runtime import Instruments
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.simulation.fakes.fake_service import now
from asyncrl.telemetry.state_clock import StateClock
from asyncrl.telemetry.trace import Tracer


@contextmanager
def quiet(spec: WorkerSpec) -> Iterator[Instruments]:
    """Opens instruments on virtual time that write nothing."""
    log = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger("CRITICAL"))
    yield Instruments(StateClock(now), Tracer(None, spec.instance), log)
