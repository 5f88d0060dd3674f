"""The numbers of a model that decide its cost: dense or with experts, with plain or latent attention."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from asyncrl.engines.models.model_shape import Shape
from asyncrl.errors import ConfigError

WIDE = 2
"""Bytes of a weight, an activation and a cached value, in bfloat16."""

OF_EXPERTS = ("num_experts", "num_local_experts", "moe_intermediate_size")
"""Keys of experts, which are counted apart from the shape of the dense layers."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a decoder-only transformer.

    shape: embeddings, attention, and the dense feed-forward layers. heads: of queries, which tensor parallelism splits.
    expert_layers: layers with experts in place of a dense feed-forward layer. experts: of such a layer; chosen: of them
    for each token; expert_inner: width of each; shared_inner: width of the one that every token uses. latent: cached
    values of a token and layer with latent attention; 0: keys and values of all heads. less_attention: parameters that
    latent attention saves in each layer. config: what was read.
    """

    name: str
    shape: Shape
    heads: int
    expert_layers: int = 0
    experts: int = 0
    chosen: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    latent: int = 0
    less_attention: int = 0
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> Self:
        """Reads them from a model's config.json. Raises KeyError for another kind of model."""
        experts = int(
            config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 0
        )
        dense = {name: value for name, value in config.items() if name not in OF_EXPERTS}
        shape = Shape.of(dense)
        heads = int(config["num_attention_heads"])
        latent, saved = _latent_attention(config, shape)
        if not experts:
            return cls(name, shape, heads, latent=latent, less_attention=saved, config=config)
        inner = int(config.get("moe_intermediate_size") or config["intermediate_size"])
        return cls(
            name=name,
            shape=shape,
            heads=heads,
            expert_layers=int(config["num_hidden_layers"]) - int(config.get("first_k_dense_replace") or 0),
            experts=experts,
            chosen=int(config["num_experts_per_tok"]),
            expert_inner=inner,
            shared_inner=int(config.get("n_shared_experts") or 0) * inner,
            latent=latent,
            less_attention=saved,
            config=config,
        )

    @property
    def of_plans(self) -> Shape:
        """Returns the shape by which plans count memory, with all experts."""
        return Shape.of(self.config)

    @property
    def layers(self) -> int:
        return self.shape.layers

    @property
    def hidden(self) -> int:
        return self.shape.hidden

    @property
    def attention_width(self) -> int:
        """Returns the width of all queries of a layer."""
        return self.shape.width("q_proj")

    @property
    def cache_bytes(self) -> int:
        """Returns the bytes of keys and values of one token, in bfloat16."""
        return self.layers * self.latent * WIDE if self.latent else self.layers * 2 * self.shape.width("k_proj") * WIDE

    @property
    def expert_parameters(self) -> int:
        """Returns the parameters of one expert of one layer: three matrices."""
        return 3 * self.hidden * self.expert_inner

    @property
    def plain_parameters(self) -> int:
        """Returns the parameters that every token uses: all but routed experts."""
        dense = 3 * self.hidden * self.shape.width("gate_proj")
        common = 3 * self.hidden * self.shared_inner + self.hidden * self.experts
        return self.shape.parameters + self.expert_layers * (common - dense) - self.layers * self.less_attention

    @property
    def parameters(self) -> int:
        return self.plain_parameters + self.expert_layers * self.experts * self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Returns the parameters that one token is multiplied with: one embedding table is only looked up."""
        looked_up = self.shape.vocabulary * self.hidden
        tied = self.shape.parameters - self._in_layers < 2 * looked_up
        chosen = self.expert_layers * self.chosen * self.expert_parameters
        return self.plain_parameters + chosen - (0 if tied else looked_up)

    @property
    def _in_layers(self) -> int:
        return self.layers * sum(inputs * outputs for _, inputs, outputs in self.shape.linear)

    def touched_experts(self, tokens: float) -> float:
        """Returns how many experts of a layer a batch of tokens reads, on average: E (1 - (1 - k / E)^tokens)."""
        return self.experts * (1.0 - (1.0 - self.chosen / self.experts) ** tokens) if self.experts else 0.0


def _latent_attention(config: Mapping[str, Any], shape: Shape) -> tuple[int, int]:
    """Returns the cached values of a token and layer of latent attention, and the parameters that it saves in each
    layer; zeros for plain attention."""
    if not (cached := int(config.get("kv_lora_rank") or 0)):
        return 0, 0
    names = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_attention_heads")
    queries, plain, rotated, values, heads = (int(config[name]) for name in names)
    asked = queries * (shape.hidden + heads * (plain + rotated))
    kept = shape.hidden * (cached + rotated) + cached * heads * (plain + values)
    attention = asked + kept + heads * values * shape.hidden
    usual = sum(
        inputs * outputs for name, inputs, outputs in shape.linear if name in ("q_proj", "k_proj", "v_proj", "o_proj")
    )
    return cached + rotated, usual - attention


def _llama(hidden: int, layers: int, inner: int, heads: int, kv_heads: int, vocabulary: int = 32000) -> dict[str, Any]:
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "model_type": "llama"}


def _qwen(kind: str, *sizes: int, tied: bool = False) -> dict[str, Any]:
    width = {} if kind == "qwen2" else {"head_dim": 128}
    return {**_llama(*sizes), "model_type": kind, "tie_word_embeddings": tied, **width}


def _experts(config: dict[str, Any], experts: int, chosen: int, inner: int) -> dict[str, Any]:
    return {**config, "num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": inner}


_DEEPSEEK_V3 = {
    **_experts({**_llama(7168, 61, 18432, 128, 128, 129280), "head_dim": 128}, 256, 8, 2048),
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

NAMED: Mapping[str, Mapping[str, Any]] = {
    "llama-7b": _llama(4096, 32, 11008, 32, 32),
    "llama-13b": _llama(5120, 40, 13824, 40, 40),
    "llama-34b": _llama(8192, 48, 22016, 64, 8),
    "llama-70b": _llama(8192, 80, 28672, 64, 8),
    "llama-3.1-8b": _llama(4096, 32, 14336, 32, 8, 128256),
    "qwen2.5-7b": _qwen("qwen2", 3584, 28, 18944, 28, 4, 152064),
    "qwen2.5-1.5b": _qwen("qwen2", 1536, 28, 8960, 12, 2, 151936, tied=True),
    "qwen2.5-0.5b": _qwen("qwen2", 896, 24, 4864, 14, 2, 151936, tied=True),
    "qwen3-4b": _qwen("qwen3", 2560, 36, 9728, 32, 8, 151936, tied=True),
    "qwen3-32b": _qwen("qwen3", 5120, 64, 25600, 64, 8, 151936),
    "qwen3-30b-a3b": _experts(_qwen("qwen3_moe", 2048, 48, 6144, 32, 4, 151936), 128, 8, 768),
    "qwen3-235b-a22b": _experts(_qwen("qwen3_moe", 4096, 94, 12288, 64, 4, 151936), 128, 8, 1536),
    "deepseek-v3": _DEEPSEEK_V3,
}
"""The config.json of models by name, cut down to sizes; each model's own file on its public page is the source."""


def model_size(model: str) -> ModelSize:
    """Returns the sizes of a model by name or folder. Raises ConfigError where neither is known."""
    if model in NAMED:
        return ModelSize.of(model, NAMED[model])
    described = Path(model).expanduser() / "config.json"
    try:
        return ModelSize.of(model, json.loads(described.read_text()))
    except (OSError, ValueError, KeyError) as error:
        known = ", ".join(NAMED)
        raise ConfigError(
            f"the model {model!r} is no folder with a config.json that is understood; known: {known}"
        ) from error
