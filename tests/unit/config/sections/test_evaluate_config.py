"""Several held-out sets: what each of them takes from the section, and which mistakes are told."""

from pathlib import Path
from typing import Any

from asyncrl.config.named_files import source_files
from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.config.toml_writer import dump
from asyncrl.deploy.service_specs import service_specs
from asyncrl.protocols.service_contracts import GroupReward

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
