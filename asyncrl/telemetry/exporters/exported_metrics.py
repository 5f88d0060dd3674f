"""The metrics that the controller exports to Prometheus, as values of one moment. docs/metrics.md lists them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.telemetry.run_status import FINISHED, RunStatus, WorkerStatus

Kind = Literal["gauge", "counter"]
WORKER = ("worker", "service")
ENDED = ("trained", "dropped")
"""Stages of samples that have ended, which only become more."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One metric. A counter has no `_total` in its name here; Prometheus sees it with that."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    meaning: str


EXPORTED = (
    Exported("asyncrl_written_timestamp_seconds", "gauge", "s", (), "Unix time of these values; a new one every 2 s"),
    Exported("asyncrl_weights_version", "gauge", "count", (), "version of the trainer's weights"),
    Exported("asyncrl_steps_wanted", "gauge", "count", (), "`steps` of the config"),
    Exported("asyncrl_incarnation", "gauge", "count", (), "how often the run was resumed"),
    Exported("asyncrl_paused", "gauge", "", (), "1 while a command holds draws and steps back, else 0"),
    Exported("asyncrl_samples_in_flight", "gauge", "samples", ("stage",), "drawn samples that have not ended"),
    Exported("asyncrl_samples_ended", "counter", "samples", ("stage",), "samples of the whole run: trained, dropped"),
    Exported("asyncrl_worker_up", "gauge", "", WORKER, "1 where the worker takes calls, 0 where it is down or starts"),
    Exported("asyncrl_worker_starts", "counter", "count", WORKER, "starts since the run began or was resumed"),
    Exported(
        "asyncrl_worker_time_share",
        "gauge",
        "share",
        (*WORKER, "state"),
        "of the last 2 s, by states as above",
    ),
    Exported("asyncrl_worker_cpu_cores", "gauge", "cores", WORKER, "CPU-seconds a second, of the last 2 s"),
    Exported("asyncrl_worker_memory_bytes", "gauge", "bytes", WORKER, "resident memory of its process"),
    Exported("asyncrl_worker_queued_calls", "gauge", "calls", WORKER, "calls that wait for its compute thread"),
    Exported("asyncrl_worker_running_calls", "gauge", "calls", WORKER, "calls that it serves now"),
    Exported("asyncrl_worker_weights_version", "gauge", "count", WORKER, "of the policy's weights that it has, if any"),
    Exported("asyncrl_worker_finished", "counter", "", (*WORKER, "what"), "samples, tokens or answers since its start"),
    Exported("asyncrl_worker_value", "gauge", "", (*WORKER, "name"), "further numbers of the service, such as running"),
    Exported(
        "asyncrl_worker_gpu_memory_bytes",
        *("gauge", "bytes", (*WORKER, "kind")),
        "of its GPU: in use (`memory`), reserved by it (`own`), there (`total`)",
    ),
    Exported("asyncrl_step", "gauge", "count", (), "last step that ended; before the first one there is none"),
    Exported("asyncrl_step_metric", "gauge", "", ("name",), "every metric above, of the last step, under its name"),
)

Value = tuple[str, tuple[str, ...], float]
"""Name of a metric, values of its labels, and its value."""


def values_of(status: RunStatus | None, step: Mapping[str, Any]) -> Iterator[Value]:
    """Yields the values of one moment. step: metrics of the last step, {} before the first."""
    if status is not None:
        yield from _of_run(status)
        for worker in () if status.ended else status.workers:
            yield from _of_worker(worker)
    if step:
        yield "asyncrl_step", (), float(step["step"])
        for name, value in step.items():
            if isinstance(value, int | float):
                yield "asyncrl_step_metric", (name,), float(value)


def _of_run(status: RunStatus) -> Iterator[Value]:
    yield "asyncrl_written_timestamp_seconds", (), status.written_at
    yield "asyncrl_weights_version", (), float(status.version)
    yield "asyncrl_steps_wanted", (), float(status.steps)
    yield "asyncrl_incarnation", (), float(status.incarnation)
    yield "asyncrl_paused", (), float(status.paused)
    for stage in ENDED:
        yield "asyncrl_samples_ended", (stage,), float(status.samples.get(stage, 0))
    for stage, count in status.samples.items():
        if stage not in ENDED:
            yield "asyncrl_samples_in_flight", (stage,), float(count)


def _of_worker(worker: WorkerStatus) -> Iterator[Value]:
    labels = (worker.name, worker.service)
    yield "asyncrl_worker_up", labels, float(not worker.problem)
    yield "asyncrl_worker_starts", labels, float(worker.starts)
    if worker.problem:
        return
    for state, share in worker.shares.items():
        yield "asyncrl_worker_time_share", (*labels, state), share
    yield "asyncrl_worker_cpu_cores", labels, worker.cores
    yield "asyncrl_worker_memory_bytes", labels, float(worker.memory)
    yield "asyncrl_worker_queued_calls", labels, float(worker.queued)
    yield "asyncrl_worker_running_calls", labels, float(len(worker.doing))
    if worker.version is not None:
        yield "asyncrl_worker_weights_version", labels, float(worker.version)
    for name, number in worker.counters.items():
        yield ("asyncrl_worker_finished" if name in FINISHED else "asyncrl_worker_value"), (*labels, name), number
    for kind, size in worker.gpu.items():
        yield "asyncrl_worker_gpu_memory_bytes", (*labels, kind), size
