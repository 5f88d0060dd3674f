"""The fast path of generation: the forward of Llama-like models, written out over a flat row of tokens.

Without the calls of transformers' modules, and with sums in place, a small model generates 1.16 times the tokens per
second (docs/performance.md). The path computes with the parameters of the model itself, so new weights need no copy.
Models that it does not know run through their modules (`LlamaForward.of` returns None), and its results are compared
with theirs once per loaded model (`supported_models.py`).
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from asyncrl.engines.generation.forward.attention import FlatTokens, attend

KNOWN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Normalises by the root mean square of the last dimension."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Self:
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, states: Tensor) -> Tensor:
        return rms_norm(states, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class Linear:
    """Applies a linear map; weight: [out, in]."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: nn.Linear) -> Self:
        return cls(module.weight, module.bias)

    def __call__(self, states: Tensor) -> Tensor:
        return linear(states, self.weight, self.bias)

    def float32(self) -> Self:
        """Returns a float32 copy of the map, for float32 states."""
        return type(self)(self.weight.float(), None if self.bias is None else self.bias.float())

    def into(self, target: Tensor, states: Tensor) -> None:
        """Writes the result into `target`, which may be columns of a wider tensor."""
        if self.bias is None:
            torch.mm(states, self.weight.t(), out=target)
        else:
            torch.addmm(self.bias, states, self.weight.t(), out=target)

    def add_to(self, sums: Tensor, states: Tensor) -> None:
        """Adds the result to `sums` in place."""
        sums.addmm_(states, self.weight.t())
        if self.bias is not None:
            sums += self.bias


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """Applies the rotary position embedding. cosine, sine: [tokens, 1, size], the first half of the sine negated."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def of(cls, module: nn.Module, states: Tensor, positions: Tensor) -> Self:
        cosine, sine = module(states, positions[None])
        half = sine.shape[-1] // 2
        return cls(cosine[0, :, None], torch.cat((-sine[0, :, :half], sine[0, :, half:]), -1)[:, None])

    def __call__(self, states: Tensor) -> Tensor:
        """Computes x cos + (-x2, x1) sin for x [tokens, heads, size] with the halves x1 and x2."""
        swapped = states.roll(states.shape[-1] // 2, -1)
        return (states * self.cosine).addcmul_(swapped, self.sine)


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Computes one layer.

    inputs: the maps to queries, keys and values. head_norms: norms of queries and keys, where the model has them.
    """

    number: int
    heads: int
    kv_heads: int
    size: int
    scaling: float
    before_attention: RmsNorm
    inputs: tuple[Linear, Linear, Linear]
    head_norms: tuple[RmsNorm, RmsNorm] | None
    mixed: Linear
    before_mlp: RmsNorm
    gate: Linear
    up: Linear
    down: Linear

    @classmethod
    def of(cls, number: int, module: Any) -> Self:
        own, mlp = module.self_attn, module.mlp
        size = own.head_dim
        norms = (RmsNorm.of(own.q_norm), RmsNorm.of(own.k_norm)) if hasattr(own, "q_norm") else None
        return cls(
            number=number,
            heads=own.q_proj.out_features // size,
            kv_heads=own.k_proj.out_features // size,
            size=size,
            scaling=own.scaling,
            before_attention=RmsNorm.of(module.input_layernorm),
            inputs=(Linear.of(own.q_proj), Linear.of(own.k_proj), Linear.of(own.v_proj)),
            head_norms=norms,
            mixed=Linear.of(own.o_proj),
            before_mlp=RmsNorm.of(module.post_attention_layernorm),
            gate=Linear.of(mlp.gate_proj),
            up=Linear.of(mlp.up_proj),
            down=Linear.of(mlp.down_proj),
        )

    def attention(self, sums: Tensor, rotation: RotaryEmbedding, flat: FlatTokens) -> Tensor:
        """Computes attention [tokens, heads * size] from the residual sums [tokens, width], before the map `mixed`."""
        states = self._inputs(self.before_attention(sums))
        queries, shared = self.heads, self.heads + self.kv_heads
        if self.head_norms is not None:
            for norm, part in zip(self.head_norms, (states[:, :queries], states[:, queries:shared]), strict=True):
                part.copy_(norm(part))
        turned = rotation(states[:, :shared])
        mixed = attend(self.number, turned[:, :queries], turned[:, queries:], states[:, shared:], flat, self.scaling)
        return mixed.flatten(1)

    def _inputs(self, states: Tensor) -> Tensor:
        """Returns queries, keys and values as one [tokens, heads + 2 kv heads, size], so one rotation serves two."""
        widths = [heads * self.size for heads in (self.heads, self.kv_heads, self.kv_heads)]
        columns = states.new_empty(len(states), sum(widths))
        for product, target in zip(self.inputs, torch.split(columns, widths, 1), strict=True):
            product.into(target, states)
        return columns.view(len(states), -1, self.size)

    def finish(self, sums: Tensor, mixed: Tensor) -> None:
        """Adds the outputs of attention and MLP to the residual sums, in place."""
        self.mixed.add_to(sums, mixed)
        states = self.before_mlp(sums)
        self.down.add_to(sums, silu(self.gate(states), inplace=True).mul_(self.up(states)))


class LlamaForward:
    """Computes the logits of a model of one of the classes KNOWN; construct it with `of`."""

    def __init__(self, model: Any) -> None:
        body = model.model
        self._embeddings: Tensor = body.embed_tokens.weight
        self._rotary: nn.Module = body.rotary_emb
        self._layers = [LlamaLayer.of(number, module) for number, module in enumerate(body.layers)]
        self._norm = RmsNorm.of(body.norm)
        self._head = Linear.of(model.lm_head)

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Returns the written-out forward of a model, or None for a model with parts that it does not know."""
        return cls(model) if _is_known(model) else None

    def logits(self, ids: Tensor, flat: FlatTokens, last: Tensor) -> Tensor:
        """Returns the logits [len(last), head rows] after the tokens `last` of ids, int64 [tokens]."""
        return self._head(self.states(ids, flat, last))

    def states(self, ids: Tensor, flat: FlatTokens, last: Tensor) -> Tensor:
        """Returns the final hidden states [len(last), width] of the tokens `last`."""
        sums = embedding(ids, self._embeddings)
        rotation = RotaryEmbedding.of(self._rotary, sums, flat.positions)
        for layer in self._layers:
            mixed = layer.attention(sums, rotation, flat)
            if layer is self._layers[-1]:
                sums, mixed = sums[last], mixed[last]
            layer.finish(sums, mixed)
        return self._norm(sums)


def _is_known(model: Any) -> bool:
    if type(model) not in KNOWN or model.config.hidden_act not in ("silu", "swish"):
        return False
    plain = all(type(module) is nn.Linear for name, module in model.named_modules() if name.endswith(("_proj", "head")))
    return plain and all(2 * len(model.model.rotary_emb.inv_freq) == at.self_attn.head_dim for at in model.model.layers)
