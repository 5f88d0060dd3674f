"""Sends the spans of a run to an OpenTelemetry collector, by OTLP over HTTP. It needs the extra `otel`.

    workers ── logs/INSTANCE.trace.jsonl ──> SpanExporter, beside the controller ── POST URL/v1/traces ──> collector

Workers do nothing for it: the files are those of the trace, of which the exporter reads what is new. Spans of one group
of samples have one trace id. What a collector does not take is sent again, from where the files were read to.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from asyncrl.telemetry.trace import SUFFIX

SECONDS = 2.0
"""Time between two rounds."""
ROUND_BYTES = 1 << 20
"""Bytes of one file that a round sends: some 8,000 spans."""
DEADLINE = 10.0
"""Seconds for a collector to take the spans of one file."""
LAST = 2.0
"""Seconds at the end of a run for the spans that are left."""


class SpanExporter:
    """Follows the trace files of a run. url: of the collector. logs: folder of the files. run: its id, from which trace
    ids are made. say: takes what a person should read."""

    def __init__(self, url: str, logs: Path, run: str, say: Callable[[str], None]) -> None:
        self._url = f"{url.rstrip('/')}/v1/traces"
        self._logs = logs
        self._run = run
        self._say = say
        self._read_to = {path: path.stat().st_size for path in logs.glob(f"*{SUFFIX}")}  # An earlier start sent these.
        self._failed = False

    async def run(self) -> None:
        """Sends spans until cancelled, and then those that are left."""
        async with httpx2.AsyncClient(timeout=DEADLINE, trust_env=False) as client:
            try:
                while True:
                    await self.round(client)
                    await asyncio.sleep(SECONDS)
            finally:
                await self._send_rest(client)

    async def _send_rest(self, client: httpx2.AsyncClient) -> None:
        try:
            async with asyncio.timeout(LAST):
                while await self.round(client):
                    pass
        except TimeoutError:
            self._say(f"{self._url} did not take the last spans within {LAST:g} s; trace.json.gz has them")

    async def round(self, client: httpx2.AsyncClient) -> bool:
        """Sends what is new in each file; a file whose spans were not taken is read again. Returns whether any were."""
        sent = False
        for path in await asyncio.to_thread(lambda: sorted(self._logs.glob(f"*{SUFFIX}"))):
            begin = self._read_to.get(path, 0)
            body, end = await asyncio.to_thread(self._request, path, begin)
            if body and not await self._sent(client, body):
                return False
            self._read_to[path] = end
            sent = sent or bool(body)
        return sent

    async def _sent(self, client: httpx2.AsyncClient, body: bytes) -> bool:
        try:
            answer = await client.post(self._url, content=body, headers={"content-type": "application/x-protobuf"})
            problem = "" if answer.is_success else f"status {answer.status_code}"
        except httpx2.HTTPError as error:
            problem = repr(error)
        if bool(problem) != self._failed:
            self._failed = bool(problem)
            again = f"does not take spans ({problem}); they are sent again, and trace.json.gz has all of them"
            self._say(f"{self._url} {again if problem else 'takes spans again'}")
        return not problem

    def _request(self, path: Path, begin: int) -> tuple[bytes, int]:
        """Returns a request with the spans in whole lines from `begin` on, b"" without any, and where they end."""
        with path.open("rb") as file:
            file.seek(begin)
            lines = file.read(ROUND_BYTES).rpartition(b"\n")[0]
        if not lines:
            return b"", begin
        instance = path.name.removesuffix(SUFFIX)
        request = ExportTraceServiceRequest()
        resource = request.resource_spans.add()
        names = {"service.name": "asyncrl", "service.instance.id": instance, "asyncrl.run": self._run}
        resource.resource.attributes.extend(attributes(names))
        scope = resource.scope_spans.add()
        scope.scope.name = "asyncrl"
        scope.spans.extend(self._spans(map(json.loads, lines.split(b"\n")), instance))
        return (request.SerializeToString() if scope.spans else b""), begin + len(lines) + 1

    def _spans(self, events: Iterable[Mapping[str, Any]], instance: str) -> Iterator[Span]:
        for event in events:
            if event["ph"] != "X" or event.get("cat") != "asyncrl":
                continue
            args = event.get("args", {})
            subject = f"group {args['group']}" if "group" in args else instance
            begin = round(1e3 * event["ts"])
            yield Span(
                trace_id=sha256(f"{self._run} {subject}".encode()).digest()[:16],
                span_id=os.urandom(8),
                name=event["name"],
                kind=Span.SPAN_KIND_INTERNAL,
                start_time_unix_nano=begin,
                end_time_unix_nano=begin + round(1e3 * event["dur"]),
                attributes=attributes(args),
            )


def attributes(values: Mapping[str, Any]) -> Iterator[KeyValue]:
    for name, value in values.items():
        kept = AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=str(value))
        yield KeyValue(key=name, value=kept)
