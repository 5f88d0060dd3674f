"""Tiny random models of each family, with a byte-level tokenizer, as folders for from_pretrained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from asyncrl.config.schema import Config
from asyncrl.engines.generation import attention, block_pool, flat_model, running_batch
from asyncrl.engines.generation.engine_interface import Completion, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine

SPECIAL = ("<pad>", "<bos>", "<eos>", "<|im_end|>", "<|endoftext|>")
PADDED_VOCABULARY = 288  # rows of the head; the tokenizer knows 261 ids
TEMPLATE = (
    "<bos>{% for message in messages %}{{ message.role }}:{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 24}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "llama-biased": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-scaled": (LlamaConfig, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-gelu": (LlamaConfig, {"hidden_act": "gelu"}),
    "smollm2": (LlamaConfig, {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}),
}
MakeEngine = Callable[..., TorchEngine]
OTHER_SECTIONS = {"max_prompt_tokens": "task", "dtype": "model", "float32_head": "model", "lora": "model"}
OTHER_SECTIONS |= {"layout": "training", "use": "environment", "max_tokens": "environment"}
EPISODES = {"use": "unused.py:Unused", "max_tokens": 90}
"""Settings of an engine whose samples have turns."""


def engine_config(**settings: Any) -> Config:
    """The config of an engine; each setting goes to its section."""
    sections: dict[str, dict[str, Any]] = {"model": {"name": "tiny"}, "task": {"prompts": "none"}, "generation": {}}
    for name, value in settings.items():
        sections.setdefault(OTHER_SECTIONS.get(name, "generation"), {})[name] = value
    return Config.model_validate(sections)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, as byte-level BPE without merges; adds <bos> to nothing by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    fast.chat_template = TEMPLATE
    return fast


def make_model(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    kind, settings = FAMILIES[family]
    shape = {
        "vocab_size": PADDED_VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": 3,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    config = kind(**(shape | settings | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
            if parameter.ndim == 2:
                parameter.mul_(4.0 if "embed" not in name else 8.0)  # logits that are not flat
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(model_folder: Callable[[str], Path]) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer as it is loaded, for a test to change."""
    return AutoTokenizer.from_pretrained(model_folder("llama"))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes KV blocks of 4 positions: they are taken, given back, shared and moved all the time."""
    for module in (block_pool, running_batch, attention, attention, block_pool, flat_model):
        monkeypatch.setattr(module, "KV_BLOCK", 4)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    torch.set_num_threads(1)
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture
def changed_model(tmp_path: Path) -> Callable[..., Path]:
    """changed_model(family, **config) -> folder of a model of this family with other settings."""
    return lambda family, **changes: make_model(family, tmp_path, **changes)


@pytest.fixture
def make_engine(model_folder: Callable[[str], Path]) -> MakeEngine:
    def make(family: str = "llama", version: int = 0, **settings: Any) -> TorchEngine:
        shape = {"slots": 5, "max_prompt_tokens": 40, "max_new_tokens": 24} | settings
        return TorchEngine(model_folder(family), engine_config(**shape), version)

    return make


@pytest.fixture
def plain_logprobs(model_folder: Callable[[str], Path]) -> Callable[..., np.ndarray]:
    """Log-probs of a completion's tokens by an ordinary forward over the whole sequence."""

    def logprobs(completion: Completion, family: str, weights: dict[str, torch.Tensor] | None = None) -> np.ndarray:
        model = AutoModelForCausalLM.from_pretrained(model_folder(family), dtype=torch.float32)
        if weights is not None:
            model.load_state_dict(weights, strict=False)
        request = completion.request
        ids = torch.from_numpy(np.concatenate([request.prompt, completion.tokens]).astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(request.prompt) - 1 : -1]
        logits[:, len(AutoTokenizer.from_pretrained(model_folder(family))) :] = -torch.inf
        every = (logits / (request.temperature or 1.0)).log_softmax(-1)
        return every.gather(-1, ids[len(request.prompt) :, None])[:, 0].numpy()

    return logprobs


@pytest.fixture
def requests() -> Callable[..., list[SampleRequest]]:
    """Ragged prompts and lengths."""

    def make(count: int, seed: int = 0, temperature: float = 1.0, **changes: Any) -> list[SampleRequest]:
        random = np.random.default_rng(seed)
        return [
            SampleRequest(
                key=(number, 0, 0),
                prompt=random.integers(5, 261, random.integers(1, 40)).astype(np.int32),
                seed=int(random.integers(1 << 62)),
                temperature=temperature,
                **({"max_new_tokens": int(random.integers(1, 25))} | changes),
            )
            for number in range(count)
        ]

    return make


@pytest.fixture
def drain() -> Callable[..., dict[Any, Completion]]:
    """Submit and step until nothing is active; completions by key."""

    def run(engine: TorchEngine, requests: list[SampleRequest], between: Callable[[int], None] | None = None) -> Any:
        for request in requests:
            engine.submit(request)
        done: dict[Any, Completion] = {}
        step = 0
        while engine.active:
            done |= {completion.request.key: completion for completion in engine.step()}
            step += 1
            if between:
                between(step)
        return done

    return run


@pytest.fixture(scope="session")
def lab(model_folder: Callable[[str], Path]) -> Any:
    from tests.unit.engines.generation.lab import Lab  # It imports this file.

    return Lab(model_folder)
