"""Tiny trainers: their configs, random rows that a tiny model could have sampled, and the gradients of a step."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from asyncrl.config.schema import Config
from asyncrl.engines.training.models_with_heads import frozen_logprobs, load_causal_model
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import StepOutcome, Trainer, run_step

KNOWN = 50
INCARNATION = 1
VERSION = 5
PATIENCE = 60.0
SPANS = ([5, 3, 4, 0], [3, 2, 1, 4, 6, 0], [7, 0], [4, 2, 3, 2], [1, 1, 1, 0])
"""Tokens sampled and given: of two turns and of three, of one, with tokens given at the end, of single tokens."""
Result = TypeVar("Result")


def make_config(**sections: dict[str, Any]) -> Config:
    """make_config(training={...}, algorithm={...}, ...) -> Config with a learning rate that shows, and a token mean."""
    training = {"learning_rate": 1e-3, **sections.pop("training", {})}
    given = sections.pop("algorithm", {})
    algorithm = given if "preset" in given else {"aggregation": "token_mean", **given}
    shape = {"model": {"name": "tiny"}, "task": {"prompts": "none"}, "steps": 10}
    return Config.model_validate({**shape, "training": training, "algorithm": algorithm, **sections})


def make_rows(count: int = 12, seed: int = 0, **changes: Any) -> list[TrainRow]:
    """Ragged rows; prompts 2 to 9 tokens, responses 1 to 20."""
    draw = np.random.default_rng(seed)
    return [_row(draw, index, changes) for index in range(count)]


def _row(draw: np.random.Generator, index: int, changes: dict[str, Any]) -> TrainRow:
    tokens = int(draw.integers(1, 21))
    values: dict[str, Any] = {
        "group": index // 4,
        "member": index % 4,
        "attempt": 0,
        "incarnation": INCARNATION,
        "prompt_ids": draw.integers(0, KNOWN, int(draw.integers(2, 10))),
        "response_ids": draw.integers(0, KNOWN, tokens),
        "logprobs": draw.normal(-4, 0.3, tokens).astype(np.float32),
        "versions": np.full(tokens, VERSION),
        "advantage": float(draw.normal()),
    }
    return TrainRow(**{**values, **changes})


def make_episodes(count: int = 10, seed: int = 0, spans: Sequence[Sequence[int]] = SPANS) -> list[TrainRow]:
    """Rows of several turns, with values and a reference; spans: of each row."""
    draw = np.random.default_rng(seed)
    rows = []
    for index, row in enumerate(make_rows(count, seed)):
        own = np.array(spans[index % len(spans)], np.int32)
        tokens = int(own[::2].sum())
        changes = {
            "response_ids": draw.integers(0, KNOWN, int(np.abs(own).sum())),
            "versions": np.full(tokens, VERSION),
            "logprobs": draw.normal(-4, 0.3, tokens).astype(np.float32),
            "reference_logprobs": draw.normal(-4, 0.3, tokens).astype(np.float32),
            "values": draw.normal(0, 0.3, tokens).astype(np.float32),
            "spans": own,
        }
        rows.append(dataclasses.replace(row, **changes))
    return rows


def changed(rows: Sequence[TrainRow], **changes: Any) -> list[TrainRow]:
    """Returns the rows with changes; a function is given the row."""
    return [
        dataclasses.replace(row, **{name: each(row) if callable(each) else each for name, each in changes.items()})
        for row in rows
    ]


def drawn(mean: float, spread: float, seed: int = 7) -> Callable[[TrainRow], np.ndarray]:
    """Draws a float32 number for each token of a row."""
    draw = np.random.default_rng(seed)
    return lambda row: draw.normal(mean, spread, len(row.versions)).astype(np.float32)


def logprobs_now(folder: Path, rows: Sequence[TrainRow]) -> list[np.ndarray]:
    """Returns the model's own log-probs of each row, computed alone."""
    model = load_causal_model(folder, "cpu")
    return [frozen_logprobs(model, [row], 1024)[0] for row in rows]


def near(folder: Path, rows: Sequence[TrainRow], spread: float, seed: int = 7) -> list[TrainRow]:
    """Returns the rows with recorded log-probs near the model's own."""
    noise = drawn(0, spread, seed)
    pairs = zip(rows, logprobs_now(folder, rows), strict=True)
    return [dataclasses.replace(row, logprobs=(now + noise(row)).astype(np.float32)) for row, now in pairs]


def step(trainer: Trainer, rows: Sequence[TrainRow], version: int = VERSION) -> StepOutcome:
    return run_step(trainer, rows, INCARNATION, version)


def gradients(trainer: Trainer, rows: Sequence[TrainRow]) -> tuple[StepOutcome, list[torch.Tensor]]:
    """Returns the outcome of a step, and the gradients of its last update before they are clipped."""
    found: dict[torch.nn.Parameter, torch.Tensor] = {}
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda p: found.update({p: p.grad.clone()}))
        for parameter in trainer.optimizer.parameters
    ]
    outcome = step(trainer, rows)
    for hook in hooks:
        hook.remove()
    return outcome, [found[parameter] for parameter in trainer.optimizer.parameters]


def assert_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor | None], atol: float = 1e-6) -> None:
    """Two lists of gradients, which are not 0, are the same up to rounding."""
    assert max(float(each.abs().max()) for each in found) > 1e-4
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-4)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.float().clone() for name, tensor in trainer.named_tensors().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def side_by_side(work: Sequence[Callable[[], Result]]) -> list[Result]:
    """Runs ranks as threads."""
    with ThreadPoolExecutor(len(work)) as threads:
        return [done.result(PATIENCE) for done in [threads.submit(each) for each in work]]
