"""Prometheus scrapes the quickstart while it trains."""

import signal
import sys
import urllib.request
from contextlib import closing, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.lanes.bound_socket import bound_socket
from asyncrl.telemetry.exporters.exported_metrics import EXPORTED
from asyncrl.telemetry.metrics_file import read_metrics

sys.path.insert(0, str(Path(__file__).parent))
from test_joining import program, steps_in
from watching import PATIENCE, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs"), pytest.mark.timeout(240)]

WORKERS = {"generation0.0": "generation", "reward0.0": "reward", "training0.0": "training"}


def scrape(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Returns the samples by metric, {} before anything is served."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {family.name: [(sample.labels, sample.value) for sample in family.samples] for family in families}
    return {}


def test_metrics_of_a_run_that_goes_on_are_scraped(quickstart_model: Path, tmp_path: Path) -> None:
    run_dir, shown = tmp_path / "run", tmp_path / "run.out"
    with closing(bound_socket("127.0.0.1", 0, "a test")) as socket:
        port = socket.getsockname()[1]
    flags = ["--run-dir", str(run_dir), "--model.name", str(quickstart_model), "--steps", "5000", "--evaluate.prompts="]
    flags += ["--telemetry.prometheus", f"127.0.0.1:{port}"]
    found: dict[str, list[tuple[dict[str, str], float]]] = {}

    def finished() -> set[str]:
        """Returns the workers that have finished something."""
        found.update(scrape(port))
        return {labels["worker"] for labels, value in found.get("asyncrl_worker_finished", []) if value > 0}

    with program("run", "quickstart", *flags, output=shown) as run:
        wait_until(lambda: finished() >= set(WORKERS) and bool(found["asyncrl_step"]), shown.read_text)
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE) == 0, shown.read_text()
    assert f"metrics for Prometheus: http://127.0.0.1:{port}/metrics" in shown.read_text()
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
    assert steps_in(shown) >= step
