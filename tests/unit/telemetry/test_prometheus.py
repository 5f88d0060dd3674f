"""Metrics for Prometheus: scraped over HTTP and read with the parsers of prometheus-client, explained, drawn."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.errors import ConfigError
from asyncrl.lanes.bound_socket import bound_socket
from asyncrl.telemetry.prometheus import EXPORTED, PrometheusExporter
from asyncrl.telemetry.run_status import RunStatus, WorkerStatus
from asyncrl.telemetry.sinks import read_token

ROOT = Path(__file__).parents[3]
TOKEN = "0123456789abcdef"
WORKERS = (
    WorkerStatus(
        *("generation0[0]", "a", "", ("x", "y"), 3, {"busy": 0.5}, 0.93, 512, 2, {"tokens": 100.0, "running": 7.0}),
        *({"tokens": 9.0}, 5, {"own": 20.0, "memory": 30.0, "total": 80.0}, "generation"),
    ),
    WorkerStatus("reward0[0]", "b", "killed by SIGKILL", (), 0, {}, 0.0, 0, 1, {}, service="reward"),
)
STATUS = RunStatus(1e9, 7, 25, {"running": 4, "trained": 50}, WORKERS, incarnation=1, paused=True)
WORKER = ("generation0[0]", "generation")
DOWN = ("reward0[0]", "reward")
STEP = {"step": 7, "reward/mean": 0.75, "skipped": "text"}

SCRAPED = {
    ("asyncrl_written_timestamp_seconds", ()): 1e9,
    ("asyncrl_weights_version", ()): 7,
    ("asyncrl_steps_wanted", ()): 25,
    ("asyncrl_incarnation", ()): 1,
    ("asyncrl_paused", ()): 1,
    ("asyncrl_samples_in_flight", ("running",)): 4,
    ("asyncrl_samples_ended_total", ("trained",)): 50,
    ("asyncrl_samples_ended_total", ("dropped",)): 0,
    ("asyncrl_worker_up", WORKER): 1,
    ("asyncrl_worker_up", DOWN): 0,
    ("asyncrl_worker_starts_total", WORKER): 2,
    ("asyncrl_worker_starts_total", DOWN): 1,
    ("asyncrl_worker_time_share", (*WORKER, "busy")): 0.5,
    ("asyncrl_worker_cpu_cores", WORKER): 0.93,
    ("asyncrl_worker_memory_bytes", WORKER): 512,
    ("asyncrl_worker_queued_calls", WORKER): 3,
    ("asyncrl_worker_running_calls", WORKER): 2,
    ("asyncrl_worker_weights_version", WORKER): 5,
    ("asyncrl_worker_finished_total", (*WORKER, "tokens")): 100,
    ("asyncrl_worker_value", (*WORKER, "running")): 7,
    ("asyncrl_worker_gpu_memory_bytes", (*WORKER, "own")): 20,
    ("asyncrl_worker_gpu_memory_bytes", (*WORKER, "memory")): 30,
    ("asyncrl_worker_gpu_memory_bytes", (*WORKER, "total")): 80,
    ("asyncrl_step", ()): 7,
    ("asyncrl_step_metric", ("step",)): 7,
    ("asyncrl_step_metric", ("reward/mean",)): 0.75,
}


@asynccontextmanager
async def scraped(token: str = "") -> AsyncIterator[tuple[PrometheusExporter, httpx2.AsyncClient]]:
    """An exporter on a free port of loopback, and a client for it."""
    exporter = PrometheusExporter("127.0.0.1:0", token)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(exporter.run())
        base = f"http://127.0.0.1:{exporter.port}"
        async with httpx2.AsyncClient(timeout=20, trust_env=False, base_url=base) as client:
            yield exporter, client
        serving.cancel()


def numbers(families: Any) -> dict[tuple[str, tuple[str, ...]], float]:
    labels = {each.name: each.labels for each in EXPORTED}
    samples = [sample for family in families for sample in family.samples]
    return {
        (sample.name, tuple(sample.labels[label] for label in labels[sample.name.removesuffix("_total")])): sample.value
        for sample in samples
    }


async def test_a_scrape_has_all_metrics_of_run_workers_and_step() -> None:
    async with scraped() as (exporter, client):
        empty = numbers(text_string_to_metric_families((await client.get("/metrics")).text))
        assert empty == {}
        exporter.take_status(STATUS)
        exporter.take_step(STEP)
        answer = await client.get("/metrics")
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/plain")
        found = numbers(text_string_to_metric_families(answer.text))
        assert found == SCRAPED
        assert {name.removesuffix("_total") for name, _ in found} == {each.name for each in EXPORTED}
        exporter.take_step({"step": 8, "reward/mean": 0.875})
        asked = {"accept": "application/openmetrics-text;version=1.0.0;escaping=underscores"}
        answer = await client.get("/metrics", headers=asked)
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        assert numbers(openmetrics_families(answer.text))["asyncrl_step_metric", ("reward/mean",)] == 0.875


async def test_other_requests_get_a_status() -> None:
    async with scraped() as (exporter, client):
        exporter.take_status(STATUS)
        assert (await client.get("/")).status_code == 404
        assert (await client.post("/metrics")).status_code == 405
        head = await client.head("/metrics")
        assert (head.status_code, head.text) == (200, "")
        assert int(head.headers["content-length"]) > 1000


async def test_without_the_token_nothing_is_told(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    async with scraped(str(file)) as (exporter, client):
        exporter.take_status(STATUS)
        for sent in ({}, {"authorization": "Bearer 0123456789abcdeF"}, {"authorization": f"Basic {TOKEN}"}):
            for path in ("/metrics", "/"):
                answer = await client.get(path, headers=sent)
                assert (answer.status_code, "asyncrl_" in answer.text) == (401, False)
        answer = await client.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
        assert "asyncrl_worker_up" in answer.text
        assert TOKEN not in answer.text


@pytest.mark.parametrize("text", ["short", "0123456789 abcdef", "", "0123456789abcdé€"])
def test_what_is_no_token(text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"token holds no token: write at least 16 letters"):
        read_token(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(str(tmp_path / "none"))


async def test_the_texts_of_a_moment_are_made_once() -> None:
    async with scraped() as (exporter, client):
        exporter.take_status(STATUS)
        for _ in range(3):
            await client.get("/metrics")
        (text,) = exporter._texts.values()
        assert exporter._texts[next(iter(exporter._texts))] is text
        exporter.take_status(STATUS)
        assert exporter._texts == {}


async def test_a_port_that_is_taken_names_the_key() -> None:
    held = bound_socket("127.0.0.1", 0, "a test")
    held.listen()
    with pytest.raises(ConfigError, match=r"telemetry\.prometheus: 127\.0\.0\.1:\d+ cannot be listened at"):
        PrometheusExporter(f"127.0.0.1:{held.getsockname()[1]}")
    held.close()


async def test_a_scrape_says_kind_and_meaning_of_every_metric() -> None:
    async with scraped() as (_, client):
        families = text_string_to_metric_families((await client.get("/metrics")).text)
        told = [(each.name, each.type, each.documentation) for each in families]
        assert told == [(each.name, each.kind, each.meaning) for each in EXPORTED]


DASHBOARD = json.loads((ROOT / "deploy/grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
FUNCTIONS = {"rate", "sum", "max", "count", "time", "vector", "scalar", "or"}
"""Functions of PromQL that the expressions use."""


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_expression_of_the_dashboard_names_exported_metrics_and_their_labels(panel: dict[str, Any]) -> None:
    names = {f"{each.name}_total" if each.kind == "counter" else each.name: each for each in EXPORTED}
    documented = (ROOT / "docs/metrics.md").read_text()
    for target in panel["targets"]:
        selected = re.findall(r"(\w+)\{([^}]*)\}", target["expr"])
        assert selected, target
        for name, conditions in selected:
            labels = dict(re.findall(r'(\w+)=~?"([^"]*)"', conditions))
            assert labels.pop("instance") == "$instance"
            assert set(labels) <= set(names[name].labels)
            if name == "asyncrl_step_metric":
                assert f"`{labels['name']}`: " in documented
        known = {label for name, _ in selected for label in names[name].labels}
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known
        rest = re.sub(r"\w+\{[^}]*\}(\[1m\])?", "", target["expr"])
        assert set(re.findall(r"[a-z_]+", rest)) <= FUNCTIONS


def test_the_dashboard_shows_all_that_is_exported_of_workers() -> None:
    shown = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    assert [each.name for each in EXPORTED if each.name.startswith("asyncrl_worker") and each.name not in shown] == []


def test_the_dashboard_has_the_structure_that_grafana_loads() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert DASHBOARD["uid"]
    assert DASHBOARD["schemaVersion"] >= 36
    assert [each["name"] for each in DASHBOARD["templating"]["list"]] == ["datasource", "instance"]
    for panel in PANELS:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["refId"] for target in panel["targets"]] == list("ABCD"[: len(panel["targets"])])
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
