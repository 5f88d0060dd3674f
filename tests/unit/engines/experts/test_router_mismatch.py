"""In bfloat16 engine and trainer choose different experts for some tokens; a replay brings their log-probs together.

pytest -s prints the rows of the table in docs/corrections.md."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.engines.generation.engine_interface import Completion, SampleRequest
from asyncrl.engines.models.model_families import RecordShape
from asyncrl.engines.models.router_replay import WEIGHTS
from asyncrl.engines.training.micro_batches import lay_out_rows
from asyncrl.engines.training.models_with_heads import CausalModel, token_logprobs
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step
from tests.unit.engines.experts.test_recorded_experts import engine_of
from tests.unit.engines.experts.test_router_replay import config_of, rows_of
from tests.unit.engines.generation.conftest import drain, requests
from tests.unit.engines.generation.test_families import tiny_model

Drain = Callable[..., dict[Any, Completion]]
MakeRequests = Callable[..., list[SampleRequest]]
MANY = {"num_experts": 32, "num_local_experts": 32, "num_experts_per_tok": 4}
STALE_STEPS = 4
__all__ = ["drain", "requests"]


class OtherChoices:
    """Counts how often routers of a model choose other experts than those of a record [tokens, layers x k]."""

    def __init__(self, model: CausalModel, shape: RecordShape) -> None:
        self._shape = shape
        self._own: list[torch.Tensor] = []
        for module in model.whole.modules():
            if type(module).__name__ in WEIGHTS:
                module.register_forward_hook(lambda _, __, output: self._own.append(output[2].sort(-1).values))

    def share(self, record: torch.Tensor) -> float:
        own = torch.stack(self._own, 1)
        self._own.clear()
        recorded = record.reshape(len(record), self._shape.routers, -1).long().sort(-1).values
        known = recorded[:, 0, 0] != self._shape.none
        return float((recorded != own).any(-1)[known].float().mean())


def mismatch(trainer: PolicyTrainer, rows: list[TrainRow], *, replayed: bool) -> tuple[float, float]:
    """Returns mean |log-prob of the trainer - log-prob of the engine|, and the share of choices that differ."""
    model = trainer.model
    assert model.replay is not None
    prompts = [row.prompt_ids for row in rows]
    responses = [row.response_ids for row in rows]
    padded = lay_out_rows(prompts, responses, 1.0, model.device, experts=[row.experts for row in rows])
    record = padded.passes[0].experts
    shape = model.replay.shape
    assert record is not None
    if not replayed:
        padded = lay_out_rows(prompts, responses, 1.0, model.device)
        choices = OtherChoices(model, shape)
    with torch.no_grad():
        found, _ = token_logprobs(model, padded, 4096)
    share = model.replay.others(lambda counts: counts) if replayed else choices.share(record)
    recorded = np.concatenate([row.logprobs for row in rows])
    return float(np.abs(found.numpy() - recorded).mean()), share


def loud_experts(folder: Path) -> Path:
    """Scales the experts of a random model up, which add next to nothing to its states as they are initialised."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 3:
                parameter.mul_(10)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_replay_lowers_the_mismatch_of_bfloat16(
    family: str, tmp_path: Path, requests: MakeRequests, drain: Drain
) -> None:
    folder = loud_experts(tiny_model(family, tmp_path, **MANY))
    sampled = [requests(32, seed=seed, max_new_tokens=24) for seed in (5, 6)]
    rows, trained = (rows_of(drain(engine_of(folder, dtype="bfloat16", slots=16), each)) for each in sampled)
    for steps in (0, STALE_STEPS):
        trainer = PolicyTrainer(config_of(precision="bfloat16", learning_rate=1e-4), folder)
        for _ in range(steps):
            run_step(trainer, trained, 0, 0)
        (replayed, others), (plain, different) = (mismatch(trainer, rows, replayed=each) for each in (True, False))
        row = f"| `{family}` | {steps} | {different:.2%} | {plain:.5f} | {others:.2%} | {replayed:.5f} |"
        sys.stdout.write(row + "\n")
        assert min(others, different) > 0
        assert replayed < 0.5 * plain
