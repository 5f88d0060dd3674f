"""Several held-out sets: what each of them takes from the section, and which mistakes are told."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.named_files import source_files
from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.config.toml_writer import dump
from asyncrl.deploy.service_specs import service_specs
from asyncrl.errors import ConfigError
from asyncrl.protocols.service_contracts import GroupReward
from tests import golden

TOML = """\
[model]
name = "m"
[task]
prompts = "p.jsonl"
[evaluate]
every = 5
size = 10
[evaluate.sets.math]
prompts = "math.jsonl"
functions = ["numeric", { use = "own.py:tidy", weight = 0.5 }]
every = 50
[evaluate.sets.words]
prompts = "words.jsonl"
samples = 4
temperature = 0.7
size = 3
"""


def config_of(evaluate: dict[str, Any]) -> Config:
    return Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, "evaluate": evaluate})


def test_a_set_takes_what_it_lacks_from_the_section(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(TOML)
    config = load(tmp_path / "x.toml", environ={}).config
    math, words = config.evaluate.held_out
    assert (math.name, math.every, math.samples, math.temperature, math.size) == ("math", 50, 1, 0.0, 10)
    assert (words.name, words.every, words.samples, words.temperature, words.size) == ("words", 5, 4, 0.7, 3)
    assert [function.use for function in math.functions] == ["numeric", f"{tmp_path}/own.py:tidy"]
    assert math.prompts == str(tmp_path / "math.jsonl")
    assert [spec.name for spec in service_specs(config)][-1] == "evaluation"
    (tmp_path / "again.toml").write_text(dump(config))
    assert load(tmp_path / "again.toml", environ={}).config == config
    assert {key for key, _ in source_files(config)} == {"task.prompts", "evaluate.sets"}


def test_every_group_of_an_evaluation_belongs_to_one_set() -> None:
    section = config_of({"size": 10, "sets": {"a": {"prompts": "a"}, "b": {"prompts": "b", "size": 3}}}).evaluate
    groups = {
        name: [section.set_named(name).group(number) for number in range(size)]
        for name, size in (("", 10), ("a", 10), ("b", 3))
    }
    assert [group for own in groups.values() for group in own] == list(range(-1, -24, -1))
    assert {name: {section.set_of(group).name for group in own} for name, own in groups.items()} == {
        "": {""},
        "a": {"a"},
        "b": {"b"},
    }
    assert section.most_samples == 1


def test_a_group_function_of_a_set_has_its_group_in_one_replica() -> None:
    functions = [{"use": "mine:share", "group": True}]
    config = config_of({"sets": {"a": {"prompts": "a", "functions": functions}}})
    assert next(spec for spec in service_specs(config) if spec.name == "reward").contract is GroupReward


@pytest.mark.parametrize(
    ("evaluate", "told"),
    [
        ({"sets": {"code": {"prompts": "a"}}}, "'code'"),
        ({"sets": {"a b": {"prompts": "a"}}}, "'a b'"),
        ({"sets": {"a": {"prompts": "a", "sample": 2}}}, r"mean samples\?"),
        ({"sets": {"a": {"prompts": "a", "samples": 2}}}, "0 all"),
        ({"sets": {"a": {"prompts": "a", "functions": ["numeric", "numeric"]}}}, "'numeric'"),
        ({"sets": {"a": {"prompts": "a", "functions": [{"use": "m:f", "by_token": True}]}}}, "remove by_token = true"),
        ({"sets": {"a": {}}}, "evaluate.sets: .*prompts"),
    ],
)
def test_mistakes_in_sets_are_told(evaluate: dict[str, Any], told: str) -> None:
    values = {"model": {"name": "m"}, "task": {"prompts": "p"}, "reward": {"functions": ["numeric"]}}
    with golden.raises(ConfigError, match=told):
        load(values={**values, "evaluate": evaluate}, environ={})


def test_a_best_checkpoint_needs_held_out_prompts() -> None:
    values = {"model": {"name": "m"}, "task": {"prompts": "p"}, "training": {"keep_best": "-eval/cost/mean"}}
    with pytest.raises(ConfigError, match=r"training\.keep_best.*nothing measures eval/cost/mean without held-out"):
        load(values=values, environ={})


HELD_OUT = {"prompts": "q.jsonl", "samples": 4, "temperature": 1.0}


@pytest.mark.parametrize(
    ("metric", "keys", "says"),
    [
        ("eval/pass_at_1", {"samples": 1, "temperature": 0.0}, r"evaluate\.samples = 1 has no pass@k"),
        ("eval/pass_at_8", {}, r"samples = 4 measures pass@1, 2, 4 only; write more samples"),
        ("eval/pass_at_3", {}, r"measures pass@1, 2, 4 only"),
        ("-eval/pass_at_8_low", {}, r"nothing measures eval/pass_at_8_low"),
        (
            "eval/words/pass_at_4",
            {"sets": {"words": {"prompts": "w", "samples": 2}}},
            r"evaluate\.sets\.words\.samples = 2",
        ),
        ("eval/pass_at_4", {}, ""),
        ("eval/words/pass_at_2", {"sets": {"words": {"prompts": "w", "samples": 2}}}, ""),
    ],
)
def test_a_best_checkpoint_is_chosen_by_a_pass_rate_that_is_measured(
    metric: str, keys: dict[str, Any], says: str
) -> None:
    sections = {"model": {"name": "m"}, "task": {"prompts": "p"}, "training": {"keep_best": metric}}
    values = {**sections, "evaluate": {**HELD_OUT, **keys}}
    if says:
        with pytest.raises(ValueError, match=says):
            Config.model_validate(values)
    else:
        Config.model_validate(values)
