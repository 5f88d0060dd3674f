"""Serves the newest state of a run to Prometheus, on the controller's event loop. It needs the extra `prometheus`.

StatusWriter ── status ──┐
Recorder ───── metrics ──┴──> PrometheusExporter ── text, made once for each state ──> GET /metrics
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from asyncrl.lanes.http_server import HttpServer
from asyncrl.telemetry.run_status import FINISHED, RunStatus, WorkerStatus
from asyncrl.telemetry.sinks import host_and_port, read_token

# The metrics that the controller exports to Prometheus, as values of one moment. A scrape has their meanings.


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


CONNECTIONS = 16
"""Scrapes at one time; Prometheus makes one."""
OPENMETRICS = "application/openmetrics-text"
"""The format that a scrape may ask for in place of Prometheus' own."""

Message = MutableMapping[str, Any]


class PrometheusExporter:
    """Serves metrics. address: HOST:PORT. token: file with the token that scrapes have to send; "": none is needed."""

    def __init__(self, address: str, token: str = "") -> None:
        self._token = read_token(token) if token else ""
        self._server = HttpServer(self, *host_and_port(address), connections=CONNECTIONS)
        self._moment: tuple[RunStatus | None, Mapping[str, Any]] = (None, {})
        self._texts: dict[str, bytes] = {}
        self.port = self._server.listen("telemetry.prometheus")

    def take_status(self, status: RunStatus) -> None:
        self._moment = (status, self._moment[1])
        self._texts = {}

    def take_step(self, metrics: Mapping[str, Any]) -> None:
        self._moment = (self._moment[0], metrics)
        self._texts = {}

    async def run(self) -> None:
        """Serves until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._server.serve(), name="metrics over HTTP")
            try:
                await asyncio.Event().wait()
            finally:
                await self._server.stop()

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of the newest moment, for an encoder of prometheus-client."""
        families: dict[str, Metric] = {}
        for spec in EXPORTED:
            made = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            families[spec.name] = made(spec.name, spec.meaning, labels=spec.labels)
        for name, labels, value in values_of(*self._moment):
            families[name].add_metric(labels, value)  # type: ignore[attr-defined]
        yield from families.values()

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answers one request, as an ASGI app."""
        headers = {bytes(name).lower(): bytes(value) for name, value in scope["headers"]}
        status, kind, body = self._response(scope["method"], scope["path"], headers)
        answer = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": answer})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _response(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> tuple[int, str, bytes]:
        sent = headers.get(b"authorization", b"")
        if self._token and not hmac.compare_digest(sent, f"Bearer {self._token}".encode()):
            return 401, "text/plain", b"send the token of telemetry.prometheus_token as a bearer\n"
        if path != "/metrics":
            return 404, "text/plain", b"the metrics are at /metrics\n"
        if method not in ("GET", "HEAD"):
            return 405, "text/plain", b"metrics are only read\n"
        encode, kind = choose_encoder(OPENMETRICS if OPENMETRICS.encode() in headers.get(b"accept", b"") else "")
        if kind not in self._texts:
            self._texts[kind] = encode(self)
        return 200, kind, self._texts[kind]
