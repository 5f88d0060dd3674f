"""The trainer's account and chain hold what entered the loss of an update that was taken, and nothing else."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncrl.engines.training.training_step
from asyncrl.engines.training.micro_batches import micro_batches
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import StepOutcome, run_step
from asyncrl.protocols.messages import LEFT_OUT

Train = Callable[..., StepOutcome]
BOUNDS = {"rejection": "geometric", "rejection_low": 0.9, "rejection_high": 1.1}


@pytest.fixture
def train(tiny: Path, make_config: Callable) -> Train:
    def step(rows: list[TrainRow], **sections: dict) -> StepOutcome:
        return run_step(PolicyTrainer(make_config(**sections), tiny), rows, 1, 5)

    return step


def reasons(outcome: StepOutcome) -> list[str]:
    return [sample.untrained_because for sample in outcome.samples]


def expect(outcome: StepOutcome, rows: list[TrainRow], expected: Sequence[str]) -> None:
    assert reasons(outcome) == list(expected)
    assert outcome.metrics["tokens/trained"] == sum(sample.trained for sample in outcome.samples)
    assert outcome.trained == tuple(row.key for row, why in zip(rows, expected, strict=True) if not why)


def test_a_row_lost_between_packing_and_loss_has_not_trained(
    train: Train, make_rows: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lossy(*given: Any, packed: bool) -> list[list[int]]:
        return [[row for row in part if row != 2] for part in micro_batches(*given, packed=packed)]

    monkeypatch.setattr(asyncrl.engines.training.training_step, "micro_batches", lossy)
    rows = make_rows(4)
    outcome = train(rows)
    expect(outcome, rows, ["", "", LEFT_OUT, ""])
    assert outcome.samples[2].trained == 0


def test_masked_rows_have_not_trained(train: Train, make_rows: Callable) -> None:
    rows = make_rows(3)
    rows = [rows[0], dataclasses.replace(rows[1], truncated=True), dataclasses.replace(rows[2], incarnation=0)]
    expect(train(rows, algorithm={"mask_truncated": True}), rows, ["", "truncated", "stale"])


def test_an_update_that_is_not_finite_has_trained_none_of_its_rows(train: Train, make_rows: Callable) -> None:
    rows = make_rows(4)
    rows = [*rows[:3], dataclasses.replace(rows[3], advantage=float("nan"))]
    outcome = train(rows, training={"updates": 2, "micro_batch_tokens": 1})
    assert outcome.updates == 1
    expect(outcome, rows, ["", "", "not finite", "not finite"])


def test_rows_whose_every_token_is_rejected_have_not_trained(train: Train, on_policy: Callable) -> None:
    rows = on_policy(4)
    rows = [*rows[:3], dataclasses.replace(rows[3], logprobs=rows[3].logprobs - 3)]
    expect(train(rows, algorithm=BOUNDS), rows, ["", "", "", "rejected"])


def test_a_batch_whose_every_token_is_rejected_is_no_step(
    tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    rows = [dataclasses.replace(row, logprobs=row.logprobs - 30) for row in make_rows(4)]
    engine = PolicyTrainer(make_config(algorithm=BOUNDS, training={"weight_decay": 0.1}), tiny)
    before = [parameter.detach().clone() for parameter in engine.optimizer.parameters]
    outcome = run_step(engine, rows, 1, 5)
    assert (outcome.updates, outcome.skipped, engine.optimizer.updates) == (0, "rejected", 0)
    expect(outcome, rows, ["rejected"] * 4)
    assert all(parameter.grad is None for parameter in engine.optimizer.parameters)
    assert all(now.equal(then) for now, then in zip(engine.optimizer.parameters, before, strict=True))


def test_shown_rows_have_the_numbers_of_their_tokens(train: Train, make_rows: Callable) -> None:
    rows = make_rows(3)
    count = len(rows[0].versions)
    parts = np.linspace(-1.0, 1.0, count) / 3
    rows[0] = dataclasses.replace(rows[0], is_shown=True, advantage=parts, rewards=parts[::-1].copy())
    rows[1] = dataclasses.replace(rows[1], is_shown=True)
    rows[2] = dataclasses.replace(rows[2], advantage=np.zeros(len(rows[2].versions)))
    first, second, third = train(rows).samples
    assert first.advantages == pytest.approx(parts, abs=5e-5)
    assert first.rewards == pytest.approx(parts[::-1], abs=5e-5)
    assert (second.advantages, second.rewards, third.advantages) == ((), (), ())
