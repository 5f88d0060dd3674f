"""Every family of docs/models.md trains: the engine records the log-probs that transformers' own forward has, across
windows and shared KV blocks, and the ratio of what it has just sampled is 1 in the trainer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.engines.generation.engine_interface import SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.models.model_families import TRAINED, family_problems
from asyncrl.errors import ConfigError
from tests.unit.engines.generation.conftest import (
    PADDED_VOCABULARY,
    byte_tokenizer,
    drain,
    engine_config,
    plain_logprobs,
    requests,
)
from tests.unit.engines.generation.test_agreement_with_training import trained_on

WINDOW = 12
SHAPE = {
    "vocab_size": PADDED_VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"] * 2}
CHOSEN = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OWN: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {"query_pre_attn_scalar": 12, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    "gemma3_text": ALTERNATE | {"query_pre_attn_scalar": 12},
    "phi": {"partial_rotary_factor": 0.5},
    "olmo3": ALTERNATE,
    "gpt_oss": ALTERNATE | CHOSEN,
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.5},
    "cohere2": ALTERNATE | {"logit_scale": 0.5},
    "exaone4": ALTERNATE | {"sliding_window_pattern": 2},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4},
    "mixtral": CHOSEN,
    "qwen2_moe": CHOSEN | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": CHOSEN,
}


def tiny_model(family: str, folder: Path, **changes: Any) -> Path:
    """A random model with windows far below the length of rows, and sinks, biases and caps that count."""
    config = AutoConfig.for_model(family, **(SHAPE | OWN.get(family, {}) | changes))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name or name.endswith("bias"):
                parameter.normal_()
            elif parameter.ndim == 2 and "router" not in name:
                parameter.mul_(4.0 if "embed" not in name else 8.0)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def group(wanted: list[SampleRequest]) -> list[SampleRequest]:
    """Lets the members of groups of four share a prompt, and so KV blocks."""
    return [replace(each, prompt=wanted[number // 4 * 4].prompt) for number, each in enumerate(wanted)]


@pytest.mark.parametrize("family", [name for name, special in TRAINED.items() if "experts" in special])
def test_an_engine_refuses_to_keep_the_bits_of_a_model_with_experts(family: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has experts, and the product of an expert has as many rows"):
        TorchEngine(tiny_model(family, tmp_path), engine_config(deterministic=True), 0)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("family", TRAINED)
def test_engine_and_trainer_compute_what_transformers_does(family: str, tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path)
    config = engine_config(slots=7, max_prompt_tokens=40, max_new_tokens=24, prefill_tokens=8)
    assert not list(family_problems(config, folder))
    done = drain(TorchEngine(folder, config, 0), group(requests(8, seed=3, temperature=0.8)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    worst = max(np.abs(each.logprobs - plain_logprobs(model, each)).max() for each in done.values())
    assert worst < 2e-4
    metrics = trained_on(folder, done)
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["mismatch/kl"] < 1e-7
