"""The dict of RLTrainer: what its keys mean, and what is said about those that do not exist."""

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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"polcy": {}}, "mean policy"),
        ({"policy": {"hidden_sizes": [4]}}, r"policy\.hidden_sizes.*mean policy\.hidden_size\?"),
        ({"acting": None}, ""),
        ({"policy": [4]}, r"hidden_size.*\[4\]"),
        ({"distributed": {"workers": 2}}, r"distributed\.workers: .*did you mean distributed\.num_workers\?"),
        ({"distributed": {"placement_strategy": "spraed"}}, "'spraed'.*mean spread"),
        ({"env": ""}, ""),
        ({"algorithm": "sca"}, r"acting\.algorithm.*'sca'"),
        ({"policy": {"activation": "gello"}}, r"acting\.activation.*mean gelu\?"),
        ({"acting": {"env": "CartPole-v1"}}, r"acting\.env"),
        ({"generation": {"replicas": 2}}, r"distributed\.num_workers: generation\.replicas"),
        ({"policy": {"hidden_size": 64}}, r"acting\.hidden_size.*64"),
        ({"acting": {"transitons": 3}}, r"acting\.transitons.*did you mean acting\.transitions"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_the_closest_one(changes: dict[str, object], said: str) -> None:
    with golden.raises(ConfigError, match=said):
        asyncrl.RLTrainer({**GIVEN, **changes})


def test_all_wrong_keys_are_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)algo.*policy\.size"):
        asyncrl.RLTrainer({"env": "X-v0", "algo": "PPO", "policy": {"size": [4]}})
