"""The trainer of a policy that acts, in a plain loop on small environments: it learns, masks, saves and resumes."""

import itertools
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.engines.acting import acting_trainer
from asyncrl.engines.acting.acting_trainer import ActingTrainer
from asyncrl.engines.acting.networks import TwinCritics
from asyncrl.engines.training.training_step import NOT_FINITE
from tests.unit.engines.acting.line_walk import Push, Walk
from tests.unit.engines.acting.scene import PlainActing, acting_config, plain_loop, rows_of, run_step

PPO = acting_config("line_walk.py:Walk", hidden_size=[32], environments=4, transitions=32, epochs=4, minibatch=64)
SAC = acting_config(
    "line_walk.py:Push",
    learning_rate=3e-3,
    algorithm="sac",
    hidden_size=[32, 32],
    activation="gelu",
    environments=4,
    transitions=8,
    minibatch=64,
    warm_up=64,
    tau=0.02,
    gamma=0.9,
)
BOTH = pytest.mark.parametrize(("make", "config"), [(Walk, PPO), (Push, SAC)], ids=["ppo", "sac"])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def mean_return(trainer: ActingTrainer) -> float:
    return fmean(trainer.returns) if len(trainer.returns) == 20 else -np.inf


def test_ppo_learns_to_walk_to_the_goal() -> None:
    trainer = plain_loop(Walk, PPO, lambda trained: mean_return(trained) > 0.6)
    assert mean_return(trainer) > 0.6


def test_sac_learns_to_push_to_the_middle() -> None:
    trainer = plain_loop(Push, SAC, lambda trained: mean_return(trained) > -2.0)
    assert mean_return(trainer) > -2.0


def test_short_updates_share_a_change_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=acting_trainer.PART / 4)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    acting = PlainActing(Push, SAC)
    trainer = ActingTrainer(SAC, acting.spaces)
    monkeypatch.setattr(trainer.learner, "learn", lambda rows, version: iter([True] * 9))
    acting.policy.load(trainer.named_tensors(), 0)
    step = trainer.begin(rows_of(acting, acting.segment(0), 0), 0)
    parts = 0
    while step.advance():
        parts += 1
    assert parts == 2


def test_the_loss_of_the_actor_leaves_the_critics_as_they_are() -> None:
    critics = TwinCritics(PlainActing(Push, SAC).spaces, [8], "relu")
    observations = torch.ones(4, 1)
    actions = torch.zeros(4, 1, requires_grad=True)
    values = critics(observations, actions, trained=False)
    assert torch.equal(values, critics(observations, actions))
    torch.autograd.backward(values.sum())
    assert actions.grad is not None
    assert all(each.grad is None for each in critics.parameters())


@pytest.mark.long
def test_sac_learns_with_a_prioritised_replay_and_a_bound_on_age() -> None:
    acting = SAC.acting.model_copy(update={"replay": "prioritised", "replay_max_age": 40})
    trainer = plain_loop(Push, SAC.model_copy(update={"acting": acting}), lambda trained: mean_return(trained) > -2.0)
    assert mean_return(trainer) > -2.0


@BOTH
def test_it_goes_on_from_a_checkpoint_bit_for_bit(make: type, config: Config, tmp_path: Path) -> None:
    acting = PlainActing(make, config)
    rows = [acting.segment(version) for version in range(5)]
    trainer = ActingTrainer(config, acting.spaces)
    for version in range(3):
        run_step(trainer, rows_of(acting, rows[version], version), version)
    trainer.copy_state({"version": 3}).write(tmp_path)
    restored, extra = ActingTrainer.resume(config, acting.spaces, tmp_path)
    assert extra == {"version": 3}
    metrics = []
    for each in (trainer, restored):
        torch.manual_seed(0)
        for version in (3, 4):
            step = run_step(each, rows_of(acting, rows[version], version), version)
        metrics.append(step.outcome.metrics)
    assert metrics[0] == metrics[1]
    for name, tensor in trainer.named_tensors().items():
        assert torch.equal(tensor, restored.named_tensors()[name]), name


@BOTH
def test_transitions_beyond_the_limit_are_masked_and_reported(make: type, config: Config) -> None:
    acting = PlainActing(make, config)
    rows = acting.segment(version=4)
    rows[0]["versions"][:3] = 1  # Three versions behind, and the limit is 2.
    rows[1]["versions"][:] = 1
    trainer = ActingTrainer(config, acting.spaces)
    outcome = run_step(trainer, rows_of(acting, rows, 4), 4).outcome
    length = config.acting.transitions
    assert [(sample.trained, sample.masked, sample.reason) for sample in outcome.samples] == [
        (length - 3, 3, "stale"),
        (0, length, "stale"),
        (length, 0, ""),
        (length, 0, ""),
    ]
    assert outcome.trained == ((1, 0, 0), (1, 2, 0), (1, 3, 0))
    assert outcome.metrics["staleness/masked_fraction"] == pytest.approx((3 + length) / (4 * length))
    assert outcome.metrics["staleness/max"] == 0


@BOTH
def test_a_batch_that_is_too_old_changes_nothing(make: type, config: Config) -> None:
    acting = PlainActing(make, config)
    trainer = ActingTrainer(config, acting.spaces)
    before = {name: tensor.clone() for name, tensor in trainer.named_tensors().items()}
    outcome = run_step(trainer, rows_of(acting, acting.segment(0), 9), 9).outcome
    assert (outcome.skipped, outcome.updates, outcome.trained) == ("stale", 0, ())
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.named_tensors().items())


def test_a_loss_that_is_not_finite_changes_no_weight() -> None:
    acting = PlainActing(Walk, PPO)
    trainer = ActingTrainer(PPO, acting.spaces)
    rows = acting.segment(0)
    for row in rows:
        row["rewards"][:] = np.nan
    before = {name: tensor.clone() for name, tensor in trainer.named_tensors().items()}
    outcome = run_step(trainer, rows_of(acting, rows, 0), 0).outcome
    assert (outcome.skipped, outcome.updates) == (NOT_FINITE, 0)
    assert {sample.reason for sample in outcome.samples} == {NOT_FINITE}
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.named_tensors().items())


def test_sac_warms_up_with_random_actions_and_without_updates() -> None:
    acting = PlainActing(Push, SAC)
    assert acting.policy.random_until == 2
    trainer = ActingTrainer(SAC, acting.spaces)
    updates = []
    for version in range(3):
        acting.policy.version = version
        updates.append(run_step(trainer, rows_of(acting, acting.segment(version), version), version).outcome)
    assert [each.updates for each in updates] == [0, 32, 32]
    assert [each.skipped for each in updates] == ["", "", ""]
    assert updates[2].metrics["replay/transitions"] == 96


def test_ratios_begin_at_1_when_the_weights_that_acted_train() -> None:
    acting = PlainActing(Walk, PPO)
    trainer = ActingTrainer(PPO, acting.spaces)
    acting.policy.load(trainer.named_tensors(), 0)
    metrics = run_step(trainer, rows_of(acting, acting.segment(0), 0), 0).outcome.metrics
    assert metrics["policy/kl_rollout_train"] == pytest.approx(0, abs=1e-6)
    assert metrics["acting/transitions"] == 128
