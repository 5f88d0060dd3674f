"""The dict of RLTrainer: what its keys mean, and what is said about those that do not exist."""

import tomllib

import pytest

import asyncrl
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from tests import golden

GIVEN = {
    "algorithm": "SAC",
    "env": "Pendulum-v1",
    "policy": {"hidden_size": [256, 256], "activation": "gelu"},
    "distributed": {"num_workers": 4, "placement_strategy": "spread"},
}


def config_of(**changes: object) -> Config:
    return asyncrl.RLTrainer({**GIVEN, **changes}).config


def test_every_key_stands_for_one_of_the_config() -> None:
    config = config_of(seed=5, learning_rate=1e-3, gamma=0.9, training={"checkpoint_every": 7})
    acting = config.acting
    assert (acting.algorithm, acting.env, acting.hidden_size, acting.activation) == (
        "sac",
        "Pendulum-v1",
        (256, 256),
        "gelu",
    )
    assert (config.generation.replicas, acting.children) == (4, 1)
    assert (config.seed, config.training.learning_rate, acting.gamma) == (5, 1e-3, 0.9)
    assert config.training.checkpoint_every == 7


def test_sac_takes_transitions_of_any_age_unless_a_bound_is_written() -> None:
    assert config_of().staleness.policy == "admit"
    assert config_of(staleness={"policy": "mask"}).staleness.policy == "mask"
    assert config_of(algorithm="PPO").staleness.policy == "mask"


def test_sac_takes_gradients_of_the_critics_as_they_are_unless_a_bound_is_written() -> None:
    assert config_of().training.max_grad_norm >= 1e6
    assert config_of(training={"max_grad_norm": 10.0}).training.max_grad_norm == 10.0
    assert config_of(algorithm="PPO").training.max_grad_norm == 1.0
    assert {config_of(algorithm="PPO").guards.no_variance, config_of().guards.no_signal} == {"off"}
    assert (config_of().guards.collapse, config_of(algorithm="PPO").guards.collapse) == ("off", "warn")


def test_packed_workers_are_children_of_one() -> None:
    config = config_of(distributed={"num_workers": 2, "placement_strategy": "pack"})
    assert (config.generation.replicas, config.acting.children) == (1, 2)


@pytest.mark.parametrize("line", golden.cases(__file__, "test_a_wrong_key"), ids=str)
def test_a_wrong_key(line: str) -> None:
    """The closest key or value is named."""
    with golden.raises(ConfigError):
        config_of(**tomllib.loads(line))


def test_all_wrong_keys_are_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)algo.*policy\.size"):
        asyncrl.RLTrainer({"env": "X-v0", "algo": "PPO", "policy": {"size": [4]}})
