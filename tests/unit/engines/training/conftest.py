"""A tiny model with a tokenizer smaller than its head."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
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

from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import StepOutcome
from tests.unit.engines.training.tiny_training import KNOWN, make_config, step

SHAPE = {
    "vocab_size": 64,
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
        words = Tokenizer(models.WordLevel({"<eos>": 0, **{f"w{i}": i for i in range(1, KNOWN)}}, unk_token="<eos>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture
def train(tiny: Path) -> Callable[..., StepOutcome]:
    """train(rows, algorithm={...}, ...) -> outcome of the first step of the tiny policy."""
    return lambda rows, **sections: step(PolicyTrainer(make_config(**sections), tiny), rows)
