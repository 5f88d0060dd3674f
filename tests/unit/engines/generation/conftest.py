"""Tiny random models of each family, with a byte-level tokenizer, as folders for from_pretrained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.func import functional_call
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
KNOWN = 261
PADDED_VOCABULARY = 288
"""Ids of the tokenizer, and rows of the head."""
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
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes KV blocks of 4 positions: they are taken, given back, shared and moved all the time."""
    for module in (block_pool, running_batch, attention, flat_model):
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


@torch.no_grad()
def plain_logprobs(
    model: Any, done: Completion, weights: Mapping[str, Tensor] = MappingProxyType({}), known: int | None = KNOWN
) -> np.ndarray:
    """Log-probs of the tokens of a sample by the model's own forward over the whole sequence. weights: in place of its
    own. known: ids that may be sampled."""
    begin = len(done.request.prompt)
    ids = torch.from_numpy(np.concatenate([done.request.prompt, done.tokens]).astype(np.int64))
    found = functional_call(model, dict(weights), (), {"input_ids": ids[None], "use_cache": False})
    every = (found.logits[0, begin - 1 : -1, :known] / (done.request.temperature or 1.0)).log_softmax(-1)
    logprobs: np.ndarray = every.gather(-1, ids[begin:, None])[:, 0].numpy()
    return logprobs


class Lab:
    """Engines of tiny models, and what transformers' own forward computes of their samples."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self.folder = folder
        self._models: dict[str, Any] = {}

    def engine(self, family: str = "llama", version: int = 0, **settings: Any) -> TorchEngine:
        shape = {"slots": 5, "max_prompt_tokens": 40, "max_new_tokens": 24} | settings
        return TorchEngine(self.folder(family), engine_config(**shape), version)

    def model(self, family: str = "llama") -> Any:
        """The model of a family, which nobody changes."""
        if family not in self._models:
            self._models[family] = AutoModelForCausalLM.from_pretrained(self.folder(family), dtype=torch.float32)
        return self._models[family]

    def weights(self, family: str = "llama", seed: int | None = 1) -> dict[str, Tensor]:
        """The parameters of a family, moved by a few per cent, or without a seed as they are; tied names share a
        tensor."""
        torch.manual_seed(seed or 0)
        found: dict[int, Tensor] = {}
        for each in self.model(family).parameters():
            moved = 0.0 if seed is None else 0.05 * each.detach().std().nan_to_num(0.0)
            found[id(each)] = each.detach() + moved * torch.randn_like(each)
        named = self.model(family).named_parameters(remove_duplicate=False)
        return {name: found[id(each)] for name, each in named}

    def plain(self, done: Completion, family: str = "llama", **given: Any) -> np.ndarray:
        return plain_logprobs(self.model(family), done, **given)

    def check(self, done: Mapping[Any, Completion], family: str = "llama", **given: Any) -> None:
        """What was recorded of these samples is what the model's own forward computes."""
        assert done
        for each in done.values():
            np.testing.assert_allclose(each.logprobs, self.plain(each, family, **given), atol=1e-5, rtol=0)


@pytest.fixture
def tokenizer(model_folder: Callable[[str], Path]) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer as it is loaded, for a test to change."""
    return AutoTokenizer.from_pretrained(model_folder("llama"))


@pytest.fixture(scope="session")
def lab(model_folder: Callable[[str], Path]) -> Lab:
    return Lab(model_folder)


def requests(count: int, seed: int = 0, temperature: float = 1.0, **changes: Any) -> list[SampleRequest]:
    """Ragged prompts and lengths."""
    random = np.random.default_rng(seed)
    return [
        SampleRequest(
            key=(number, 0, 0),
            prompt=random.integers(5, KNOWN, random.integers(1, 40)).astype(np.int32),
            seed=int(random.integers(1 << 62)),
            temperature=temperature,
            **({"max_new_tokens": int(random.integers(1, 25))} | changes),
        )
        for number in range(count)
    ]


def group_of(members: int, length: int, tokens: int) -> list[SampleRequest]:
    """The members of one group, with one prompt between them."""
    prompt = np.random.default_rng(length).integers(5, KNOWN, length).astype(np.int32)
    return [SampleRequest((0, member, 0), prompt, 100 + member, 1.0, tokens) for member in range(members)]


def going_on(done: Completion, tokens: int, given: Sequence[int] = (), **changes: Any) -> SampleRequest:
    """The next turn of a sample, to which these tokens were given."""
    prompt = np.concatenate([done.request.prompt, done.tokens, np.array(given, np.int32)])
    drawn = done.request.drawn + len(done.tokens)
    return replace(done.request, prompt=prompt, drawn=drawn, max_new_tokens=tokens, **changes)


def drain(
    engine: TorchEngine, wanted: Sequence[SampleRequest] = (), between: Callable[[int], None] = lambda step: None
) -> dict[Any, Completion]:
    """Submits, and steps until nothing is active; returns completions by key. between: gets the number of each step."""
    engine.submit(*wanted)
    done: dict[Any, Completion] = {}
    for step in count(1):
        if not engine.active:
            return done
        done |= {each.request.key: each for each in engine.step()}
        between(step)
    raise AssertionError


def at(step: int, change: Callable[[], object]) -> Callable[[int], None]:
    """Makes a change after one step."""
    return lambda number: change() if number == step else None  # type: ignore[return-value]


def same(left: Completion, right: Completion) -> bool:
    """Whether two samples have the same bits."""
    return np.array_equal(left.tokens, right.tokens) and left.logprobs.tobytes() == right.logprobs.tobytes()
