"""The quickstart is watched while it trains: Prometheus scrapes it, a collector gets its spans, and workers record
profiles."""

import gzip
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.lanes.bound_socket import bound_socket
from asyncrl.telemetry.jsonl import read_metrics
from asyncrl.telemetry.prometheus import EXPORTED

sys.path.insert(0, str(Path(__file__).parent))
from programs import finished
from test_joining import CLI, program, steps_in
from watching import PATIENCE, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]

WORKERS = {"generation0.0": "generation", "reward0.0": "reward", "training0.0": "training"}


@contextmanager
def collecting(spans: list[str]) -> Iterator[str]:
    """Returns the URL of a collector that appends the names of spans to a list."""

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span.name for scope in part.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def scrape(port: int) -> "Found":
    """Returns the samples by metric, {} before anything is served."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {family.name: [(sample.labels, sample.value) for sample in family.samples] for family in families}
    return {}


Found = dict[str, list[tuple[dict[str, str], float]]]


def test_a_run_that_goes_on_is_scraped_and_profiled(quickstart_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shown = tmp_path / "run.out"
    with closing(bound_socket("127.0.0.1", 0, "a test")) as socket:
        port = socket.getsockname()[1]
    flags = ["--run-dir", str(run_dir), "--model.name", str(quickstart_model), "--steps", "5000", "--evaluate.prompts="]
    flags += ["--telemetry.prometheus", f"127.0.0.1:{port}"]
    found: Found = {}
    spans: list[str] = []

    def profile(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return finished([*CLI, "monitor", str(run_dir), "--profile", *arguments], timeout=PATIENCE)

    def counting() -> set[str]:
        """Returns the workers that have finished something."""
        found.update(scrape(port))
        return {labels["worker"] for labels, value in found.get("asyncrl_worker_finished", []) if value > 0}

    with collecting(spans) as url, program("run", "quickstart", *flags, "--telemetry.otlp", url, output=shown) as run:
        wait_until(lambda: counting() >= set(WORKERS) and bool(found["asyncrl_step"]), shown.read_text)
        profiled = profile("training", "--duration", "2")
        refused = profile("reward")
        reached = steps_in(shown)
        wait_until(lambda: steps_in(shown) >= reached + 2, shown.read_text)
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE) == 0, shown.read_text()
    assert f"metrics for Prometheus: http://127.0.0.1:{port}/metrics" in shown.read_text()
    assert "profiler" not in shown.read_text(), "torch's profiler prints nothing"
    assert {"generate", "score", "step"} <= set(spans)
    (trace,) = (run_dir / "profiles").iterdir()
    assert f"of 2 s are recorded, in {trace}" in profiled.stdout, profiled.stderr
    assert "aten::" in profiled.stdout
    assert "cpu_op" in gzip.decompress(trace.read_bytes()).decode()
    assert (refused.returncode, "it computes without torch" in refused.stderr) == (2, True), refused.stderr
    check_metrics(found, run_dir)


def check_metrics(found: Found, run_dir: Path) -> None:
    lacking = {each.name for each in EXPORTED if not found.get(each.name)}
    assert lacking == {"asyncrl_worker_gpu_memory_bytes"}, "there is no GPU"
    for name in ("asyncrl_worker_up", "asyncrl_worker_starts", "asyncrl_worker_memory_bytes"):
        assert {labels["worker"]: labels["service"] for labels, _ in found[name]} == WORKERS
        assert all(value > 0 for _, value in found[name])
    for labels, value in found["asyncrl_worker_time_share"]:
        assert 0 <= value <= 1.05, labels
    (version,) = (value for _, value in found["asyncrl_weights_version"])
    behind = [version - value for _, value in found["asyncrl_worker_weights_version"]]
    assert len(behind) == 2
    assert all(-1 <= each <= 2 for each in behind)
    (step,) = (value for _, value in found["asyncrl_step"])
    recorded = {line["step"]: line for line in read_metrics(run_dir / "metrics.jsonl")}[step]
    exported = {labels["name"]: value for labels, value in found["asyncrl_step_metric"]}
    assert exported == pytest.approx({name: value for name, value in recorded.items() if not isinstance(value, str)})
