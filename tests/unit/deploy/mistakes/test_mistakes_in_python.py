"""Mistakes in calls from Python: an error of a few lines, without a traceback in a notebook, before workers start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import asyncrl
from asyncrl.errors import AsyncrlError
from tests.unit.deploy.mistakes.mistake import BASE

ROWS = [{"prompt": "ab", "answer": "a"}]
LONGEST = 400


def one(sample: asyncrl.Sample) -> float:
    return 1.0


def of_trl(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0]


class Scorer:
    def __call__(self, sample: asyncrl.Sample) -> float:
        return 1.0


def refused(call: Callable[[], object]) -> str:
    """Returns what a notebook shows of the error of a call."""
    with pytest.raises(AsyncrlError) as error:
        call()
    lines = error.value._render_traceback_()
    assert len(lines) == 1
    assert len(lines[0]) <= LONGEST
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": None}, "model: write the value of model.name, or a dict of keys of that section, not None"),
        ({"model": Path("/nowhere/modle")}, "model.name: there is no folder "),
        ({"prompts": None}, "prompts: write a form of task.prompts, a list of rows or a datasets.Dataset, not None"),
        ({"prompts": "row.jsonl"}, "did you mean rows.jsonl?"),
        ({"prompts": ["hello"]}, 'row 1: a row is a table such as {"prompt": ...}, this is str'),
        ({"prompts": {"prompt": ["a"]}}, "prompts: write a form of task.prompts, a list of rows"),
        ({"prompts": []}, "there are no rows"),
        ({"prompts": [{"question": "a"}]}, 'there is no column "prompt"; found are question'),
        ({"reward": None}, 'reward.functions is empty; write for example functions = ["exact_match"]'),
        ({"reward": 1.0}, "reward: write a function of a Sample, the name of one"),
        ({"reward": "exact_mtach"}, "did you mean exact_match?"),
        ({"reward": lambda prompt, completion: 1.0}, "missing a required argument: 'completion'"),
        ({"reward": lambda completions, **kwargs: [1.0]}, "write from_trl(lambda)"),
        ({"reward": type("Local", (), {})}, "Local is a class, and no function: give an object of it, Local()"),
        (
            {"reward": {"functions": [{"use": lambda s: 1.0, "wieght": 2}]}},
            "wieght: there is no such key; did you mean weight?",
        ),
        ({"algorithm": "gpro"}, "did you mean grpo?"),
        ({"algorithm": 3}, "3 is no algorithm: it has no function roll_out"),
        ({"steps": 0}, "steps: must be greater than 0, not 0"),
        ({"staleness": 1.5}, "staleness: write the value of staleness.limit"),
        ({"traning": {"learning_rate": 1e-5}}, "did you mean training.learning_rate?"),
        ({"learning_rate": 1e-5}, "write training.learning_rate"),
        ({"training": 1e-5}, "training is a section"),
        ({"num_generations": 8}, "write task.samples_per_prompt"),
        ({"run_dir": "rows.jsonl"}, "cannot use rows.jsonl as run directory: it is a file"),
        ({"run_dir": "model"}, "model is not empty and holds no run of asyncrl"),
        ({"on_step": "stop"}, "on_step: 'stop': write a plain function of a dict of metrics"),
        ({"environment": 3}, "environment: write a class, its name, or a dict of keys of the section, not 3"),
        ({"environment": type("Game", (), {})}, "Game has no importable name"),
    ],
)
def test_arguments_of_train(arguments: dict[str, Any], says: str, workplace: Path) -> None:
    (workplace / "rows.jsonl").write_text('{"prompt": "ab"}\n')
    (workplace / "mine.toml").write_text(BASE)
    given = {"model": "model", "prompts": ROWS, "reward": "exact_match", **arguments}
    assert says in refused(lambda: asyncrl.train(**given))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("CartPole-v1", "RLTrainer: write a dict, "),
        ({}, "env: write the name of an environment"),
        ({"env": "CartPole-v1", "algoritm": "PPO"}, "algoritm: there is no such key; did you mean algorithm?"),
        ({"env": "CartPole-v1", "algorithm": "DQN"}, "must be 'ppo' or 'sac', not 'dqn'"),
        ({"env": "CartPole-v1", "lr": 1e-3}, "lr: there is no such key; did you mean learning_rate?"),
        ({"env": "CartPole-v1", "num_workers": 2}, "did you mean distributed.num_workers?"),
        ({"env": "CartPole-v1", "zzz": 2}, "there are algorithm, env, env_options, learning_rate, gamma, seed, name"),
        ({"env": "CartPole-v1", "policy": "MlpPolicy"}, "policy: must be a table with hidden_size and activation"),
        ({"env": "CartPole-v1", "policy": {"hidden": [64]}}, "did you mean policy.hidden_size?"),
        ({"env": "CartPole-v1", "policy": {"hidden_size": 64}}, "must be a list, written as [...], not 64"),
        ({"env": "CartPole-v1", "distributed": {"placement_strategy": "pakc"}}, "did you mean pack?"),
        ({"env": "CartPole-v1", "distributed": {"num_workers": 0}}, "generation.replicas: must be greater than 0"),
        ({"env": "CartPole-v1", "gamma": 1.5}, "acting.gamma: must be less than or equal to 1"),
        ({"env": object()}, "acting.env: must be a valid string"),
    ],
)
def test_keys_of_the_trainer(given: Any, says: str) -> None:
    assert says in refused(lambda: asyncrl.RLTrainer(given))
