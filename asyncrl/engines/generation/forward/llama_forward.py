"""The forward of Llama-like models, written out over a flat row of tokens.

For a few dozen tokens of a small model, calling the modules of transformers takes a seventh of a step. This computes
with the very parameters of the model, so new weights need nothing done here. What it does not know is left to the
modules (`DirectForward.of` answers None), and what it computes is compared with theirs once (support.py).
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from asyncrl.engines.generation.attention import FlatTokens, attend

KNOWN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square normalisation over the last dimension."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Self:
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, states: Tensor) -> Tensor:
        return rms_norm(states, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class Product:
    """A linear map; weight [out, in]."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: nn.Linear) -> Self:
        return cls(module.weight, module.bias)

    def __call__(self, states: Tensor) -> Tensor:
        return linear(states, self.weight, self.bias)

    def float32(self) -> Self:
        """The same map with weights of its own, in float32; of float32 states."""
        return type(self)(self.weight.float(), None if self.bias is None else self.bias.float())

    def into(self, target: Tensor, states: Tensor) -> None:
        """Write the result into `target`, which may be columns of a wider tensor."""
        if self.bias is None:
            torch.mm(states, self.weight.t(), out=target)
        else:
            torch.addmm(self.bias, states, self.weight.t(), out=target)

    def add_to(self, sums: Tensor, states: Tensor) -> None:
        sums.addmm_(states, self.weight.t())
        if self.bias is not None:
            sums += self.bias


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position embedding of each token: cosine and sine [tokens, 1, size], the sine's first half negated."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def of(cls, module: nn.Module, states: Tensor, positions: Tensor) -> Self:
        cosine, sine = module(states, positions[None])
        half = sine.shape[-1] // 2
        return cls(cosine[0, :, None], torch.cat((-sine[0, :, :half], sine[0, :, half:]), -1)[:, None])

    def __call__(self, states: Tensor) -> Tensor:
        """[tokens, heads, size] -> the same: x cos + (-x2, x1) sin, where x1 and x2 are the halves of x."""
        swapped = states.roll(states.shape[-1] // 2, -1)
        return (states * self.cosine).addcmul_(swapped, self.sine)


@dataclass(frozen=True, slots=True)
class Layer:
    """inputs: products that give queries, keys and values. head_norms: of queries and keys, if the model has any."""

    number: int
    heads: int
    kv_heads: int
    size: int
    scaling: float
    before_attention: Norm
    inputs: tuple[Product, Product, Product]
    head_norms: tuple[Norm, Norm] | None
    mixed: Product
    before_mlp: Norm
    gate: Product
    up: Product
    down: Product

    @classmethod
    def of(cls, number: int, module: Any) -> Self:
        own, mlp = module.self_attn, module.mlp
        size = own.head_dim
        norms = (Norm.of(own.q_norm), Norm.of(own.k_norm)) if hasattr(own, "q_norm") else None
        return cls(
            number=number,
            heads=own.q_proj.out_features // size,
            kv_heads=own.k_proj.out_features // size,
            size=size,
            scaling=own.scaling,
            before_attention=Norm.of(module.input_layernorm),
            inputs=(Product.of(own.q_proj), Product.of(own.k_proj), Product.of(own.v_proj)),
            head_norms=norms,
            mixed=Product.of(own.o_proj),
            before_mlp=Norm.of(module.post_attention_layernorm),
            gate=Product.of(mlp.gate_proj),
            up=Product.of(mlp.up_proj),
            down=Product.of(mlp.down_proj),
        )

    def attention(self, sums: Tensor, rotation: Rotation, flat: FlatTokens) -> Tensor:
        """[tokens, width] -> [tokens, heads * size], not yet multiplied by `mixed`."""
        states = self._inputs(self.before_attention(sums))
        queries, shared = self.heads, self.heads + self.kv_heads
        if self.head_norms is not None:
            for norm, part in zip(self.head_norms, (states[:, :queries], states[:, queries:shared]), strict=True):
                part.copy_(norm(part))
        turned = rotation(states[:, :shared])
        mixed = attend(self.number, turned[:, :queries], turned[:, queries:], states[:, shared:], flat, self.scaling)
        return mixed.flatten(1)

    def _inputs(self, states: Tensor) -> Tensor:
        """[tokens, heads + 2 kv heads, size]: queries, keys and values in one, so that two of them turn at once."""
        widths = [heads * self.size for heads in (self.heads, self.kv_heads, self.kv_heads)]
        columns = states.new_empty(len(states), sum(widths))
        for product, target in zip(self.inputs, torch.split(columns, widths, 1), strict=True):
            product.into(target, states)
        return columns.view(len(states), -1, self.size)

    def finish(self, sums: Tensor, mixed: Tensor) -> None:
        """Add to the residual sums what attention and MLP give."""
        self.mixed.add_to(sums, mixed)
        states = self.before_mlp(sums)
        self.down.add_to(sums, silu(self.gate(states), inplace=True).mul_(self.up(states)))


class DirectForward:
    """Logits of a model of `KNOWN`; make one with `of`."""

    def __init__(self, model: Any) -> None:
        body = model.model
        self._embeddings: Tensor = body.embed_tokens.weight
        self._rotary: nn.Module = body.rotary_emb
        self._layers = [Layer.of(number, module) for number, module in enumerate(body.layers)]
        self._norm = Norm.of(body.norm)
        self._head = Product.of(model.lm_head)

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """None: the model has something that is not written out here."""
        return cls(model) if _is_known(model) else None

    def logits(self, ids: Tensor, flat: FlatTokens, last: Tensor) -> Tensor:
        """ids: int64 [tokens]. Logits [len(last), head rows] of the tokens numbered `last`."""
        return self._head(self.states(ids, flat, last))

    def states(self, ids: Tensor, flat: FlatTokens, last: Tensor) -> Tensor:
        """The same without the head: [len(last), width]."""
        sums = embedding(ids, self._embeddings)
        rotation = Rotation.of(self._rotary, sums, flat.positions)
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
