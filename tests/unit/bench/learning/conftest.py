"""A small grid of runs, as `asyncrl-bench learning` reads one."""

import pytest

from asyncrl.bench.learning.grid import Grid, read_grid

SMALL = """
goal = 0.8
[defaults]
"evaluate.samples" = 4
[expected_seconds]
quickstart = 40
[controls]
limits = [2]
seeds = [0]
rows = { "learning rate 0" = { "training.learning_rate" = 0.0 } }
[[tables]]
name = "defaults"
title = "Defaults"
tasks = ["quickstart"]
limits = [0, 2]
seeds = [0, 1]
rows = { grpo = {}, rloo = { "algorithm.preset" = "rloo" } }
[claim]
limit = 8
least_loss = 0.1
least_reward = 0.8
search_seeds = [100, 101]
seeds = [0, 1]
uncorrected = { "algorithm.old_logprobs" = "recomputed" }
[[claim.candidates]]
task = "quickstart"
values = {}
[[claim.candidates]]
task = "quickstart"
values = { "training.learning_rate" = 1e-3 }
"""


@pytest.fixture
def small_text() -> str:
    return SMALL


@pytest.fixture
def small_grid() -> Grid:
    return read_grid(SMALL)
