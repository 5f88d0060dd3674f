"""Trains stable-baselines3 to the goal of an experiment, with its network, batches and learning rate; prints JSON.

    python bench/rivals/stable_baselines_acting.py cartpole 475 0
    python bench/rivals/stable_baselines_acting.py pendulum -200 0 256    # with another width of both hidden layers

Needs stable-baselines3 2.9.2, pandas and gymnasium; lunarlander also its extra box2d.
"""

import json
import sys
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env


class Goal(BaseCallback):
    """Stops when the mean return of the last 20 episodes reaches the goal."""

    def __init__(self, goal: float) -> None:
        super().__init__()
        self.goal = goal
        self.last: deque[float] = deque(maxlen=20)
        self.reached = False

    def _on_step(self) -> bool:
        self.last.extend(info["episode"]["r"] for info in self.locals["infos"] if "episode" in info)
        self.reached = len(self.last) == 20 and float(np.mean(self.last)) >= self.goal
        return not self.reached


def model_of(name: str, seed: int, width: int) -> tuple[Any, int]:
    """Returns the model, and the most transitions."""
    if name == "pendulum":
        env = make_vec_env("Pendulum-v1", n_envs=4, seed=seed)
        batches = {"batch_size": 128, "learning_starts": 512, "train_freq": 8, "gradient_steps": 32}
        more = {"buffer_size": 50_000, "seed": seed, "device": "cpu", "policy_kwargs": {"net_arch": [width, width]}}
        return SAC("MlpPolicy", env, learning_rate=1e-3, **batches, **more), 16_000
    if name == "cartpole":
        env = make_vec_env("CartPole-v1", n_envs=8, seed=seed)
        batches = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8}
        return PPO(
            "MlpPolicy", env, learning_rate=lambda left: 1e-3 * left, seed=seed, device="cpu", **batches
        ), 102_400
    env = make_vec_env("LunarLander-v3", n_envs=16, seed=seed)
    batches = {"n_steps": 128, "batch_size": 128, "n_epochs": 4, "gamma": 0.999, "gae_lambda": 0.98, "ent_coef": 0.01}
    return PPO("MlpPolicy", env, learning_rate=1e-3, seed=seed, device="cpu", **batches), 819_200


def main(name: str, goal: float, seed: int, width: int = 64) -> None:
    torch.set_num_threads(1)
    began = time.monotonic()
    callback = Goal(goal)
    model, most = model_of(name, seed, width)
    model.learn(most, callback=callback)
    found = {"experiment": name, "seed": seed, "reached": callback.reached, "transitions": model.num_timesteps}
    print(json.dumps({**found, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:]))
