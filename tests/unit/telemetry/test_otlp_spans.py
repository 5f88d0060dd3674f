"""Spans for OpenTelemetry: a collector in this process decodes what it gets."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from asyncrl.lanes.http_server import HttpServer
from asyncrl.telemetry.otlp_spans import SpanExporter
from asyncrl.telemetry.trace import Tracer


class Collector:
    """Answers POST /v1/traces with `status`; keeps what it took."""

    def __init__(self) -> None:
        self.status = 200
        self.taken: list[ExportTraceServiceRequest] = []
        self.paths: set[str] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        self.paths.add(scope["path"])
        if self.status == 200:
            self.taken.append(ExportTraceServiceRequest.FromString(body))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for each in self.taken
            for part in each.resource_spans
            for one in part.scope_spans
            for span in one.spans
        ]


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str, httpx2.AsyncClient]]:
    collector = Collector()
    server = HttpServer(collector, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.listen('a test')}"
    async with asyncio.TaskGroup() as tasks, httpx2.AsyncClient(timeout=20, trust_env=False) as client:
        tasks.create_task(server.serve())
        yield collector, url, client
        await server.stop()


def traced(logs: Path, instance: str = "training0.0-0-a") -> Tracer:
    return Tracer(logs / f"{instance}.trace.jsonl", "training0.0")


async def test_spans_arrive_with_names_times_attributes_and_the_trace_of_their_group(tmp_path: Path) -> None:
    async with collecting() as (collector, url, client):
        exporter = SpanExporter(url, tmp_path, "1234abcd", print)
        tracer = traced(tmp_path)
        began = time.time_ns()
        with tracer.span("step", group=3, rows=8):
            pass
        with tracer.span("score", group=3):
            tracer.flow_start("sample 3.0.0")
        with tracer.span("health"):
            pass
        tracer.close()
        await exporter.round(client)
        await exporter.round(client)
    step, score, health = collector.spans
    assert collector.paths == {"/v1/traces"}
    assert [span.name for span in (step, score, health)] == ["step", "score", "health"]
    assert {each.key: each.value.int_value for each in step.attributes} == {"group": 3, "rows": 8}
    assert step.trace_id == score.trace_id != health.trace_id
    assert {len(span.trace_id) for span in collector.spans} == {16}
    assert len({span.span_id for span in collector.spans}) == 3
    assert began - 1e9 < step.start_time_unix_nano < step.end_time_unix_nano < time.time_ns() + 1e9
    (resource,) = collector.taken[0].resource_spans
    named = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert named == {
        "service.name": "asyncrl",
        "service.instance.id": "training0.0-0-a",
        "asyncrl.run": "1234abcd",
    }


async def test_what_a_collector_does_not_take_is_sent_again_and_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    async with collecting() as (collector, url, client):
        exporter = SpanExporter(url, tmp_path, "1234abcd", said.append)
        tracer = traced(tmp_path)
        with tracer.span("step"):
            pass
        tracer.flush()
        collector.status = 503
        await exporter.round(client)
        await exporter.round(client)
        assert len(said) == 1
        assert "does not take spans (status 503); they are sent again" in said[0]
        collector.status = 200
        await exporter.round(client)
        assert said[1:] == [f"{url}/v1/traces takes spans again"]
        assert [span.name for span in collector.spans] == ["step"]


async def test_a_torn_line_waits_and_spans_of_an_earlier_start_are_not_sent_again(tmp_path: Path) -> None:
    earlier = traced(tmp_path, "earlier")
    with earlier.span("old"):
        pass
    earlier.close()
    async with collecting() as (collector, url, client):
        exporter = SpanExporter(url, tmp_path, "1234abcd", print)
        tracer = traced(tmp_path)
        with tracer.span("step"):
            pass
        tracer.close()
        path = tmp_path / "training0.0-0-a.trace.jsonl"
        whole = path.read_bytes()
        path.write_bytes(whole[:-5])
        await exporter.round(client)
        assert collector.spans == []
        path.write_bytes(whole)
        await exporter.round(client)
        assert [span.name for span in collector.spans] == ["step"]


async def test_the_end_of_a_run_sends_what_is_left(tmp_path: Path) -> None:
    async with collecting() as (collector, url, _):
        exporter = SpanExporter(url, tmp_path, "1234abcd", print)
        tracer = traced(tmp_path)
        running = asyncio.create_task(exporter.run())
        await asyncio.sleep(0)
        with tracer.span("last"):
            pass
        tracer.close()
        running.cancel()
        await asyncio.wait([running])
    assert [span.name for span in collector.spans] == ["last"]
