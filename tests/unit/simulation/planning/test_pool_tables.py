"""The tables that a mapping is written as pass `plan`, with the layouts that were found."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.placement import assignment
from asyncrl.config.schema import Config
from asyncrl.config.sources.load_config import read
from asyncrl.deploy import cli, preflight
from asyncrl.deploy.checks.memory_needs import budget_problems, unchecked_memory
from asyncrl.engines.models.model_shape import Shape
from asyncrl.errors import ConfigError
from asyncrl.simulation.planning.gpus import known_gpus
from asyncrl.simulation.planning.job_file import JobTables, planned
from asyncrl.simulation.planning.model_size import NAMED
from asyncrl.simulation.planning.pool_tables import pool_tables, runs
from asyncrl.simulation.planning.search import FoundMapping, MappingSearch

GRPO = ("generation", "training", "reference")
PPO = ("actor", "critic", "reference", "reward")
JOBS: list[tuple[Sequence[str], str, dict[str, Any]]] = [
    (GRPO[:2], "qwen2.5-7b", {"gpu": "H100", "hosts": 8}),
    (GRPO[:2], "qwen2.5-7b", {"gpu": "H100", "hosts": 2}),
    (GRPO[:2], "qwen3-4b", {"gpu": "H100"}),
    (GRPO[:2], "llama-70b", {"gpu": "H200", "gpus": 16}),
    (GRPO, "qwen2.5-1.5b", {"gpu": "A100", "hosts": ("left", "right")}),
    (GRPO, "qwen3-30b-a3b", {"gpu": "H200", "hosts": 4}),
    (PPO, "qwen2.5-1.5b", {"gpu": "A100"}),
    (PPO, "qwen2.5-1.5b", {"gpu": "H100", "hosts": 3}),
    (("actor",), "qwen2.5-7b", {"gpu": "A100", "hosts": 4}),
]


@pytest.mark.parametrize(("roles", "model", "devices"), JOBS)
def test_plan_accepts_the_tables_with_the_layouts_that_were_found(
    roles: Sequence[str],
    model: str,
    devices: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tables = {"models": dict.fromkeys(roles, model), "devices": [devices], "objective": "asynchronous"}
    job = planned(JobTables.model_validate(tables), known_gpus())
    found = MappingSearch(job, runs(job)).best()[0]
    folder = tmp_path / "model"
    path = tmp_path / "mapped.toml"
    written = pool_tables(found)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(job.sizes[roles[0]].config)))
    text = f'model = {{ name = "{folder}", dtype = "bfloat16" }}\n'
    text += 'task = { prompts = "words:", prompts_per_step = 128 }\n'
    text += 'algorithm = { preset = "ppo", kl = 0.1 }\n' if "critic" in roles else "algorithm.kl = 0.1\n"
    text += "" if "reward" in roles else 'reward.functions = ["words:exact"]\n'
    if (joined := re.search(r"fleet.joined = (.*)", written)) is not None:
        text += f'fleet = {{ wire = "tcp", listen = "tcp://127.0.0.1:7000", joined = {joined[1]} }}\n'
    path.write_text(text + written.replace('pool = "reward"', f'pool = "reward"\nmodel = "{folder}"'))
    for name in ("free_shared_memory", "available_memory"):  # Those of the machine that the plan is for.
        monkeypatch.setattr(preflight, name, lambda *_: 10**13)
    monkeypatch.setattr(preflight, "device_mistakes", lambda _: iter(()))
    assert cli.main(["plan", str(path)]) == 0, capsys.readouterr()
    config = read(path)
    strategies = {
        role: strategy for each in found.sets for role, strategy in zip(each.roles, each.strategies, strict=True)
    }
    trained = strategies["actor" if "actor" in roles else "training"].degrees
    layout = config.training.layout
    assert (layout.pp, layout.tp, layout.ep, layout.dp * layout.ep) == (trained.pp, trained.tp, trained.ep, trained.dp)
    sampling = strategies["actor" if "actor" in roles else "generation"].generate
    assert (config.generation.layout_tp, config.generation.replicas, 1) == (sampling.tp, sampling.dp, sampling.pp)
    workers = assignment(config)
    for placed in found.sets:
        for role in placed.roles:
            gpus = [at for each in workers["training" if role == "actor" else role] for at in each]
            assert len(set(gpus)) == placed.gpus, "every GPU of the set is of the pool"


TIGHT: list[tuple[Sequence[str], str, dict[str, Any], float]] = [
    (GRPO[:2], "qwen2.5-0.5b", {"gpus": 1}, 18e9),
    (("actor",), "qwen2.5-0.5b", {"gpus": 2}, 11e9),
    (GRPO[:2], "qwen2.5-7b", {"gpus": 8}, 50e9),
    (GRPO[:2], "qwen2.5-7b", {"hosts": 2}, 39e9),
    (PPO, "qwen2.5-1.5b", {"gpus": 8}, 20e9),
    (GRPO[:2], "qwen3-32b", {"gpus": 16}, 90e9),
    (GRPO[:2], "qwen3-32b", {"hosts": 4}, 77e9),
    (GRPO[:2], "qwen3-30b-a3b", {"hosts": 4}, 71e9),
]
"""Devices whose memory just suffices."""


def experiment(found: FoundMapping, folder: Path, memory: float) -> Config:
    """Returns an experiment with the tables that are written, on devices with so much of the memory."""
    written = re.sub(r"memory_gb = (.*)", lambda each: f"memory_gb = {memory * float(each[1])}", pool_tables(found))
    (folder / "config.json").write_text(json.dumps(dict(found.job.sizes[found.sets[0].roles[0]].config)))
    text = f'model = {{ name = "{folder}", dtype = "bfloat16" }}\n'
    text += 'task = { prompts = "words:", prompts_per_step = 128, max_prompt_tokens = 1024 }\n'
    text += 'algorithm = { preset = "ppo", kl = 0.1 }\n' if "critic" in found.job.sizes else ""
    if (joined := re.search(r"fleet.joined = (.*)", written)) is not None:
        text += f'fleet = {{ wire = "tcp", listen = "tcp://127.0.0.1:7000", joined = {joined[1]} }}\n'
    path = folder / "mapped.toml"
    path.write_text(text + written.replace("[reward]", f'[reward]\nmodel = "{folder}"'))
    return read(path)


@pytest.mark.parametrize(("roles", "model", "devices", "memory"), TIGHT)
def test_what_fits_is_planned_without_a_word_and_half_of_the_memory_is_refused(
    roles: Sequence[str], model: str, devices: dict[str, Any], memory: float, tmp_path: Path
) -> None:
    def best(memory: float) -> FoundMapping:
        gpus = {"H200": known_gpus()["H200"].model_copy(update={"memory": memory})}
        tables = {"models": dict.fromkeys(roles, model), "devices": [{"gpu": "H200", **devices}]}
        job = planned(JobTables.model_validate(tables | {"objective": "asynchronous"}), gpus)
        return MappingSearch(job, runs(job)).best()[0]

    found = best(memory)
    shape = Shape.of(NAMED[model])
    config = experiment(found, tmp_path, 1.0)
    assert list(budget_problems(config, shape)) == []
    assert [each for each in unchecked_memory(config, shape) if "cuda" in str(each)] == []
    assert any(not each.is_warning for each in budget_problems(experiment(found, tmp_path, 0.5), shape))
    with pytest.raises(ConfigError, match="in no placement"):
        best(memory / 2)


def test_copies_of_a_model_that_does_not_fit_whole_share_it_out() -> None:
    tables = {"models": dict.fromkeys(GRPO[:2], "qwen2.5-7b"), "devices": [{"gpu": "H100", "hosts": 2}]}
    job = planned(JobTables.model_validate(tables | {"layouts": {"training": (1, 1)}}), known_gpus())
    found = MappingSearch(job, runs(job)).best()[0]
    (training,) = (each for placed in found.sets for each in placed.strategies if not each.room)
    assert training.degrees.shard > 1
    assert f"shard = {training.degrees.shard}" in pool_tables(found)


def test_a_layout_that_no_experiment_has_is_not_written() -> None:
    tables = {"models": dict.fromkeys(GRPO[:2], "qwen2.5-7b"), "devices": [{"gpu": "H100", "hosts": 8}]}
    job = planned(JobTables.model_validate(tables | {"objective": "asynchronous"}), known_gpus())
    with pytest.raises(ConfigError, match=r"no experiment has the layout .* generation, .*vLLM takes new weights from"):
        pool_tables(MappingSearch(job).best()[0])
