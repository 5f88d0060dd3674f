"""The trainer uses the experts that generation recorded, weighs them as the model does, and its router learns."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import Config
from asyncrl.engines.generation.engine_interface import Completion
from asyncrl.engines.models.model_families import REPLAYED, RecordShape, family_problems
from asyncrl.engines.models.router_replay import WEIGHTS, weights_of
from asyncrl.engines.training.micro_batches import lay_out_rows
from asyncrl.engines.training.models_with_heads import (
    CausalModel,
    frozen_logprobs,
    load_causal_model,
    logprobs_after,
    token_logprobs,
)
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import SampleRow, TrainRow, columns_of
from asyncrl.engines.training.training_step import run_step
from tests.unit.engines.generation.conftest import drain, requests
from tests.unit.engines.generation.test_agreement_with_training import train_row
from tests.unit.engines.generation.test_families import tiny_model
from tests.unit.engines.generation.test_recorded_experts import engine_of

CPU = torch.device("cpu")


def config_of(**training: Any) -> Config:
    sections = {"model": {"name": "m"}, "task": {"prompts": "p"}, "steps": 2}
    return Config.model_validate(sections | {"training": {"router_replay": True, "learning_rate": 1e-3} | training})


def rows_of(done: dict[Any, Completion]) -> list[TrainRow]:
    rows = [replace(train_row(done[key]), experts=done[key].experts.reshape(-1)) for key in sorted(done)]
    return [replace(row, advantage=float(number % 3) - 1.0) for number, row in enumerate(rows)]


@pytest.mark.parametrize("family", REPLAYED)
def test_weights_of_its_own_choice_are_the_models_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = load_causal_model(tiny_model(family, tmp_path), "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        router = next(each for each in model.whole.modules() if type(each).__name__ in WEIGHTS).to(dtype)
        logits, weights, chosen = router(torch.randn(50, 48, dtype=dtype))
        torch.testing.assert_close(weights_of(router, logits, chosen), weights, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_recorded_experts_are_used_with_weights_renormalised_and_gradient(family: str, tmp_path: Path) -> None:
    """The expected log-probs are those of a model whose other experts have no probability at all."""
    changes = {"norm_topk_prob": True} if family == "qwen3_moe" else {}
    folder = tiny_model(family, tmp_path, **changes)
    model = load_causal_model(folder, "cpu", replay=True)
    plain = load_causal_model(folder, "cpu")
    ids = [(np.arange(5, 25), np.arange(60, 70)), (np.arange(40, 50), np.arange(80, 97))]
    rows = [SampleRow(p, r, experts=np.tile(np.array([0, 3], np.uint8), 4 * (len(p) + len(r)))) for p, r in ids]
    found, _ = token_logprobs(model, lay_out_rows(rows, CPU), 1000)
    for router in plain.whole.modules():
        if type(router).__name__ in WEIGHTS:
            masked = torch.tensor([0.0, -torch.inf, -torch.inf, 0.0])
            router.forward = _without_others(router, masked)
    expected, _ = token_logprobs(plain, lay_out_rows(rows, CPU, replayed=False), 1000)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    found.sum().backward()
    for name, parameter in model.whole.named_parameters():
        if ".experts." in name:
            used = parameter.grad.flatten(1).abs().sum(1) > 0
            assert used.tolist() == [True, False, False, True], name
        elif name.endswith("gate.weight"):
            assert parameter.grad.abs().sum() > 0, name
    assert model.replay is not None
    assert 0.2 < model.replay.others(lambda counts: counts) < 1


def _without_others(router: Any, masked: torch.Tensor) -> Callable[..., Any]:
    def forward(states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = states.reshape(-1, states.shape[-1]) @ router.weight.T + masked
        weights, chosen = logits.softmax(-1).topk(2, -1)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    return forward


@pytest.mark.parametrize(("family", "checkpointing"), list(zip(REPLAYED, [False, True] * 2, strict=True)))
def test_a_step_with_the_experts_that_the_trainer_would_choose_is_the_step_without(
    family: str, checkpointing: bool, tmp_path: Path
) -> None:
    """In float32 the engine chooses as the trainer does; rows of several lengths and micro-batches, and two updates."""
    folder = tiny_model(family, tmp_path)
    rows = rows_of(drain(engine_of(folder), requests(12, max_new_tokens=9)))
    shape = {"micro_batch_tokens": 96, "updates": 2, "gradient_checkpointing": checkpointing}
    trained = [PolicyTrainer(config_of(**shape, router_replay=replay), folder) for replay in (True, False)]
    found, plain = (run_step(trainer, rows, 0, 0).metrics for trainer in trained)
    assert found.pop("mismatch/other_experts") == pytest.approx(0, abs=0.05), "the second update has other weights"
    assert found["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)
    assert found["policy/ratio_mean"] == pytest.approx(plain["policy/ratio_mean"], abs=1e-4)
    assert set(found) == set(plain)


def test_other_experts_change_the_log_probs_back_and_forth(tmp_path: Path) -> None:
    """A router that was turned around chooses others; with the record the log-probs of the same experts come closer.
    Passes without record, as of the canary, have the router's own choice before and after."""
    folder = tiny_model("qwen3_moe", tmp_path)
    rows = rows_of(drain(engine_of(folder), requests(12, max_new_tokens=20)))
    replayed, plain = (load_causal_model(folder, "cpu", replay=replay) for replay in (True, False))
    prompt = rows[0].prompt_ids
    for model in (replayed, plain):
        with torch.no_grad():
            for name, parameter in model.whole.named_parameters():
                if name.endswith("gate.weight"):
                    parameter.mul_(0.1).add_(torch.randn(parameter.shape, generator=torch.manual_seed(3)) * 0.05)
    canary = logprobs_after(plain, prompt)
    torch.testing.assert_close(logprobs_after(replayed, prompt), canary, rtol=0, atol=0)
    distance = {}
    for name, model in (("replayed", replayed), ("plain", plain)):
        pairs = zip(frozen_logprobs(model, rows, 100, replayed=model is replayed), rows, strict=True)
        distance[name] = float(np.mean(np.concatenate([np.abs(own - row.logprobs) for own, row in pairs])))
    assert distance["replayed"] < 0.8 * distance["plain"]
    torch.testing.assert_close(logprobs_after(replayed, prompt), canary, rtol=0, atol=0)


def test_each_context_and_pass_gets_the_experts_of_its_own_tokens() -> None:
    """The record of a token is its place in the row, which its id is too."""
    spans = [np.array([3, 2, 1, -4, 2, 0], np.int32), np.array([5, 0], np.int32)]
    prompts = [np.arange(3), np.arange(50, 52)]
    responses = [np.arange(3, 15), np.arange(52, 57)]
    given = [
        SampleRow(prompt, response, spans=own, experts=np.concatenate([prompt, response]).astype(np.uint8))
        for prompt, response, own in zip(prompts, responses, spans, strict=True)
    ]
    for budget in (1000, 12):
        rows = lay_out_rows(given, CPU, budget=budget)
        assert len(rows.passes) == (1 if budget == 1000 else 3)
        for each in rows.passes:
            assert each.experts is not None
            ids = each.ids.flatten()
            found = each.experts[:, 0].long()
            padding = found == 255
            torch.testing.assert_close(found[~padding], ids[~padding])
            assert (ids[padding] == 0).all()
            assert not padding[each.positions].any()


def given(**sections: Any) -> dict[str, Any]:
    return {"model": {"name": "m"}, "task": {"prompts": "p"}, "algorithm": {"kl": 0.1}} | sections


def test_rules_refuse_what_would_have_no_record(tmp_path: Path) -> None:
    replay = {"router_replay": True}
    Config.model_validate(given(training=replay, reference=replay))
    with pytest.raises(ValidationError, match=r"reference.router_replay, training.router_replay: generation records"):
        Config.model_validate(given(reference=replay))
    for generation in ({"engine": "vllm"}, {"stored_samples": "x.jsonl"}):
        with pytest.raises(ValidationError, match=r"training.router_replay, generation"):
            Config.model_validate(given(training=replay, generation=generation))
    folder = tiny_model("llama", tmp_path)
    assert [each.key for each in family_problems(config_of(), folder)] == ["training.router_replay"]
    assert "experts" in columns_of(config_of())
    assert "experts" not in columns_of(config_of(router_replay=False))


# In bfloat16 engine and trainer choose different experts for some tokens; a replay brings their log-probs together.
# pytest -s prints the rows of the table in docs/corrections.md.


MANY = {"num_experts": 32, "num_local_experts": 32, "num_experts_per_tok": 4}
STALE_STEPS = 4


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
    padded = lay_out_rows(rows, model.device)
    record = padded.passes[0].experts
    shape = model.replay.shape
    assert record is not None
    if not replayed:
        padded = lay_out_rows(rows, model.device, replayed=False)
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


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_replay_lowers_the_mismatch_of_bfloat16(family: str, tmp_path: Path) -> None:
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
