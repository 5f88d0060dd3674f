"""A tiny model with a tokenizer smaller than its head, and random rows that it could have sampled."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from asyncrl.config.schema import Config
from asyncrl.engines.training.models_with_heads import frozen_logprobs, load_causal_model
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow

KNOWN = 50
HEAD = 64
SHAPE = {
    "vocab_size": HEAD,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
FAMILIES = {"gemma": GemmaConfig, "llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
WITH_EXPERTS = {
    "gpt_oss": GptOssConfig,
    "mixtral": MixtralConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_model(family, **config) -> folder in the layout of save_pretrained."""

    def make(family: str = "llama", **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(family)
        torch.manual_seed(1)
        kind = (FAMILIES | WITH_EXPERTS)[family]
        shape = SHAPE | (EXPERTS if family in WITH_EXPERTS else {})
        model = AutoModelForCausalLM.from_config(kind(**{**shape, **changes}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3 if parameter.ndim > 1 else 1)
        model.save_pretrained(folder)
        vocabulary = {"<eos>": 0, **{f"w{i}": i for i in range(1, KNOWN)}}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>")),
            eos_token="<eos>",
            pad_token="<eos>",
        )
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture
def make_config() -> Callable[..., Config]:
    """make_config(training={...}, algorithm={...}, ...) -> Config with a learning rate that shows, and a token mean."""

    def make(**sections: dict[str, Any]) -> Config:
        training = {"learning_rate": 1e-3, **sections.pop("training", {})}
        given = sections.pop("algorithm", {})
        algorithm = given if "preset" in given else {"aggregation": "token_mean", **given}
        model = {"name": "tiny"}
        task = {"prompts": "none"}
        return Config.model_validate(
            {"model": model, "task": task, "training": training, "algorithm": algorithm, "steps": 10, **sections}
        )

    return make


@pytest.fixture
def make_rows() -> Callable[..., list[TrainRow]]:
    """make_rows(count, seed, **changes) -> ragged rows; prompts 2 to 9 tokens, responses 1 to 20."""

    def make(count: int = 12, seed: int = 0, **changes: Any) -> list[TrainRow]:
        draw = np.random.default_rng(seed)
        return [_row(draw, index, changes) for index in range(count)]

    return make


def _row(draw: np.random.Generator, index: int, changes: dict[str, Any]) -> TrainRow:
    tokens = int(draw.integers(1, 21))
    values: dict[str, Any] = {
        "group": index // 4,
        "member": index % 4,
        "attempt": 0,
        "incarnation": 1,
        "prompt_ids": draw.integers(0, KNOWN, int(draw.integers(2, 10))),
        "response_ids": draw.integers(0, KNOWN, tokens),
        "logprobs": draw.normal(-4, 0.3, tokens).astype(np.float32),
        "versions": np.full(tokens, 5),
        "advantage": float(draw.normal()),
    }
    return TrainRow(**{**values, **changes})


SPANS = ([5, 3, 4, 0], [3, 2, 1, 4, 6, 0], [7, 0], [4, 2, 3, 2], [1, 1, 1, 0])
"""Tokens sampled and given: of two turns and of three, of one, with tokens given at the end, of single tokens."""


@pytest.fixture
def make_episodes(make_rows: Callable) -> Callable[..., list[TrainRow]]:
    """make_episodes(count, seed, spans) -> rows of several turns, with values and a reference; spans: of each row."""

    def make(count: int = 10, seed: int = 0, spans: Sequence[Sequence[int]] = SPANS) -> list[TrainRow]:
        draw = np.random.default_rng(seed)
        rows = []
        for index, row in enumerate(make_rows(count, seed)):
            own = np.array(spans[index % len(spans)], np.int32)
            tokens = int(own[::2].sum())
            changes = {
                "response_ids": draw.integers(0, KNOWN, int(np.abs(own).sum())),
                "versions": np.full(tokens, 5),
                "logprobs": draw.normal(-4, 0.3, tokens).astype(np.float32),
                "reference_logprobs": draw.normal(-4, 0.3, tokens).astype(np.float32),
                "values": draw.normal(0, 0.3, tokens).astype(np.float32),
                "spans": own,
            }
            rows.append(dataclasses.replace(row, **changes))
        return rows

    return make


@pytest.fixture
def move() -> Callable[[PolicyTrainer, torch.Tensor], None]:
    """Adds a vector of all parameters to those of an engine."""

    def by(engine: PolicyTrainer, difference: torch.Tensor) -> None:
        offset = 0
        for parameter in engine.optimizer.parameters:
            parameter.data += difference[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    return by


@pytest.fixture
def on_policy(tiny: Path, make_rows: Callable) -> Callable[..., list[TrainRow]]:
    """Rows whose recorded log-probs are the model's own."""

    def make(count: int = 12, temperature: float = 1.0, **changes: object) -> list[TrainRow]:
        rows = make_rows(count, temperature=temperature, **changes)
        model = load_causal_model(tiny, "cpu")
        prompts = [row.prompt_ids for row in rows]
        responses = [row.response_ids for row in rows]
        found = frozen_logprobs(model, prompts, responses, [temperature] * count, 1024)
        return [dataclasses.replace(row, logprobs=values) for row, values in zip(rows, found, strict=True)]

    return make
