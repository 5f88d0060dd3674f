"""Serves the newest state of a run to Prometheus, on the controller's event loop. It needs the extra `prometheus`.

StatusWriter ── status ──┐
Recorder ───── metrics ──┴──> PrometheusExporter ── text, made once for each state ──> GET /metrics
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from asyncrl.lanes.http_server import HttpServer
from asyncrl.telemetry.exporters.exported_metrics import EXPORTED, values_of
from asyncrl.telemetry.exporters.scrape_address import host_and_port, read_token
from asyncrl.telemetry.run_status import RunStatus

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
