"""Checks which settings follow from an environment to act in, and which contradict it."""

from typing import Any

from asyncrl.config.schema import Config
from asyncrl.config.sources.layers import file_layer
from asyncrl.config.sources.load_config import load, resolve
from asyncrl.config.toml_writer import dump
from asyncrl.deploy.preflight import preflight
from asyncrl.deploy.service_specs import service_specs
from tests import golden
from tests.unit.engines.acting.scene import ENVIRONMENTS

WALK = f"{ENVIRONMENTS}:Walk"


def config(**values: Any) -> Config:
    return load(None, (), {}, {"acting": {"env": WALK, **values.pop("acting", {})}, **values}).config


def test_model_prompts_and_groups_follow_from_the_environment() -> None:
    found = config(acting={"environments": 5})
    assert (found.model.name, found.task.prompts) == ("acting", "acting")
    assert (found.task.samples_per_prompt, found.task.prompts_per_step) == (5, 1)
    assert found.training.learning_rate == 3e-4
    assert found.is_scored
    assert not found.warnings


def test_sac_has_its_own_defaults_under_what_is_written() -> None:
    assert config(acting={"algorithm": "sac"}).acting.hidden_size == (256, 256)
    assert config(acting={"algorithm": "sac", "hidden_size": [8]}).acting.hidden_size == (8,)
    assert config().acting.hidden_size == (64, 64)


def test_a_written_config_reads_as_the_same() -> None:
    found = config(acting={"algorithm": "sac", "environments": 3})
    assert resolve([file_layer(dump(found), "config.toml")]).config == found


def test_the_fleet_has_acting_workers_and_their_trainer() -> None:
    specs = service_specs(config(generation={"replicas": 3}))
    assert [(spec.name, spec.replicas) for spec in specs] == [("generation", 3), ("training", 1)]
    assert specs[0].implementation == "asyncrl.services.acting:ActingService"
    assert not list(preflight(config()))


def test_the_fleet_has_an_evaluation_worker_where_episodes_are_evaluated() -> None:
    evaluated = config(evaluate={"episodes": 3, "every": 4})
    assert [spec.name for spec in service_specs(evaluated)] == ["generation", "training", "evaluation"]
    assert [version for version in range(1, 10) if evaluated.evaluate.due(version) == [""]] == [4, 8]
    assert not config().evaluate.due(10)
    assert not list(preflight(evaluated))


def test_a_function_that_does_not_exist_is_found_before_anything_starts() -> None:
    (problem,) = preflight(load(None, (), {}, {"acting": {"env": f"{ENVIRONMENTS}:Wlak"}}).config)
    golden.says(str(problem), "mean Walk?")
