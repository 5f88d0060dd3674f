"""A preset stands for values of other keys, each of which may be written otherwise."""

from typing import Any

import pytest

from asyncrl.algorithms import grpo, ppo, remax, safe_rlhf
from asyncrl.algorithms.algorithm_by_name import advantages_of, algorithm_of
from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import AlgorithmConfig, Config
from asyncrl.config.sections.algorithm_config import PRESETS
from asyncrl.config.sources import load
from asyncrl.config.toml_writer import dump
from asyncrl.objectives.advantages import RewardedCut


def config(**algorithm: Any) -> Config:
    constrained = {"constraint", "safe_rlhf"} & {*algorithm, algorithm.get("preset")}
    cost = {"functions": ["exact_match"], "limit": 0.5} if constrained else {}
    task = {"prompts": "/p.jsonl"}
    return Config.model_validate({"model": {"name": "m"}, "task": task, "algorithm": algorithm, "cost": cost})


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_parts_and_each_can_be_overridden(preset: str) -> None:
    chosen = config(preset=preset).algorithm
    parts = dict(PRESETS[preset].parts)
    assert {key: getattr(chosen, key) for key in parts} == parts
    standardized = config(preset=preset, aggregation=chosen.aggregation).algorithm.normalize_std
    reads = chosen.advantage in ("group_mean", "gae")
    assert standardized is ((preset != "dr_grpo") if reads else None)
    if reads:
        assert config(preset=preset, normalize_std=not standardized).algorithm.normalize_std is not standardized
    assert config(preset=preset, entropy_bonus=0.5).algorithm.entropy_bonus == 0.5


def test_every_preset_of_the_config_is_described() -> None:
    assert set(PRESETS) == set(AlgorithmConfig.model_json_schema()["properties"]["preset"]["enum"])
    assert {key for preset in PRESETS.values() for key in preset.parts} <= set(AlgorithmConfig.model_fields)


def test_defaults_are_those_of_grpo() -> None:
    defaults = {name: field.default for name, field in AlgorithmConfig.model_fields.items()}
    assert {key: defaults[key] for key in PRESETS["grpo"].parts} == dict(PRESETS["grpo"].parts)
    assert config() == config(preset="grpo")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_written_config_reads_the_same(preset: str, tmp_path: Any) -> None:
    original = config(preset=preset, entropy_bonus=0.5)
    (tmp_path / "config.toml").write_text(dump(original))
    assert load(str(tmp_path / "config.toml"), (), {}).config == original


def test_layers_lie_over_the_preset_whichever_of_them_named_it(tmp_path: Any) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[model]\nname = "m"\n[task]\nprompts = "p.jsonl"\n[algorithm]\nclip_high = 0.4\n')
    chosen = load(str(path), ("--algorithm.preset", "dapo"), {}).config.algorithm
    assert (chosen.clip_high, chosen.aggregation) == (0.4, "token_mean")


@pytest.mark.parametrize(("correction", "cap", "floor"), [("cap", 2.0, None), ("mask", 5.0, 0.5), ("none", None, None)])
def test_a_correction_brings_its_usual_bounds(correction: str, cap: float | None, floor: float | None) -> None:
    chosen = config(old_logprobs="recomputed", correction=correction).algorithm
    assert (chosen.weight_cap, chosen.weight_floor) == (cap, floor)
    assert config(old_logprobs="recomputed").algorithm.correction == "cap"
    assert config().algorithm.correction == "none"


def test_with_a_critic_the_algorithm_is_ppos_and_what_travels_is_the_reward() -> None:
    chosen = config(preset="ppo")
    assert algorithm_of(chosen) is ppo.ALGORITHM
    assert algorithm_of(config(preset="safe_rlhf")) is safe_rlhf.ALGORITHM
    assert algorithm_of(config()) is grpo.ALGORITHM
    (found,) = advantages_of(chosen)([RewardedCut(0, (1, 2), {0: 1.0, 1: 0.25, 2: -3.0}, {1: 5, 2: 5})], 0)
    assert found == [0.25, -3.0]


def test_remax_has_an_algorithm_and_one_sample_a_prompt_is_enough() -> None:
    chosen = Config.model_validate(
        {**config(preset="remax").model_dump(), "task": {"prompts": "p", "samples_per_prompt": 1}}
    )
    assert algorithm_of(chosen) is remax.ALGORITHM
    gate = GateConfig.of(chosen)
    assert (gate.greedy, gate.baseline, gate.cut_at, gate.rows) == (True, 1, 1, 2)
    (found,) = advantages_of(chosen)([RewardedCut(0, (1,), {0: 1.0, 1: 0.25}, {1: 5}, greedy=0.5)], 0)
    assert found == [-0.25]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [("group_mean", [0.5, -0.5]), ("leave_one_out", [1.0, -1.0]), ("batch", [1.0, -1.0]), ("group_batch", [1.0, -1.0])],
)
def test_every_advantage_is_reached(advantage: str, expected: list[float]) -> None:
    unscaled = {"normalize_std": False} if advantage == "group_mean" else {}
    estimate = advantages_of(config(advantage=advantage, **unscaled))
    (found,) = estimate([RewardedCut(0, (0, 1), {0: 1.0, 1: 0.0}, {0: 500, 1: 500})], 0)
    assert found == pytest.approx(expected, abs=2e-3) or advantage.endswith("batch")
    assert found[0] == pytest.approx(-found[1])
