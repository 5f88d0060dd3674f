"""The fast path of generation: the forward of Llama-like models, written out over a flat row of tokens.

Without the calls of transformers' modules, and with sums in place, a small model generates 1.16 times the tokens per
second (docs/performance.md). The path reads the parameters of the model itself, so new weights need no copy. Its
results are compared with those of the modules once per loaded model (`FlatModel.verify`).
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from asyncrl.engines.generation.forward.attention import AttentionRule, FlatTokens, attend
from asyncrl.engines.generation.forward.layer_slices import Join, LayerStage
from asyncrl.engines.lora.low_rank import LowRankLinear

KNOWN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


def is_llama_like(model: Any) -> bool:
    """Returns whether every part of the model is one that the fast path computes."""
    if type(model) not in KNOWN or model.config.hidden_act not in ("silu", "swish"):
        return False
    linear_layers = (each for name, each in model.named_modules() if name.endswith(("_proj", "head")))
    plain = all(type(each) in (nn.Linear, LowRankLinear) for each in linear_layers)
    return plain and all(2 * len(model.model.rotary_emb.inv_freq) == at.self_attn.head_dim for at in model.model.layers)


def bind_parameters(body: Any, limit: int, stage: LayerStage, join: Join | None = None) -> Any:
    """Returns the parts of the decoder as plain objects that hold the same tensors. limit: positions of the longest
    sequence. stage: whose layers these are. join: sums over ranks with slices of the layers; None where they are whole.

    A step reads 35 attributes of each layer, and a plain object finds them faster than a module does: 2 % of a step.
    """
    layers = [_bind(body.layers[number]) for number in stage.layers]
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number  # The cache has the layers of this stage alone.
        # Mistral has one window for all layers, in its config; the others have one for each layer, or none.
        window = getattr(layer.self_attn, "sliding_window", body.config.sliding_window if _is_mistral(body) else None)
        layer.self_attn.rule = AttentionRule.of({"sliding_window": window}, limit)
    return SimpleNamespace(
        embeddings=body.embed_tokens.weight,
        rotary_emb=body.rotary_emb,
        layers=layers,
        norm=_bind(body.norm),
        join=join,
        stage=stage,
        width=body.config.hidden_size,
    )


def _is_mistral(body: Any) -> bool:
    return bool(body.config.model_type == "mistral")


def _bind(module: nn.Module) -> Any:
    plain = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    parts = {name: _bind(part) for name, part in module.named_children()}
    return SimpleNamespace(**plain, **module._parameters, **parts)


def llama_states(body: Any, ids: Tensor, flat: FlatTokens, last: Tensor) -> Tensor:
    """Returns the final hidden states [len(last), width] of the tokens `last` of ids, int64 [tokens]; at other stages
    than the last one the states that were passed on.

    body: from `bind_parameters`.
    """
    stage: LayerStage = body.stage
    if stage.is_first:
        sums = embedding(ids, body.embeddings)
    else:
        sums = stage.received(body.embeddings.new_empty((len(ids), body.width)))
    cosine, sine = (each[0, :, None] for each in body.rotary_emb(sums, flat.positions[None]))
    half = sine.shape[-1] // 2
    rotation = cosine, torch.cat((-sine[..., :half], sine[..., half:]), -1)
    for layer in body.layers:
        mixed = _attention(layer.self_attn, _normalise(layer.input_layernorm, sums), rotation, flat)
        if stage.is_last and layer is body.layers[-1]:
            sums = sums[last]
            mixed = mixed[last]
        _add_product(layer.self_attn.o_proj, sums, mixed, body.join)
        states = _normalise(layer.post_attention_layernorm, sums)
        mlp = layer.mlp
        gates = silu(_product(mlp.gate_proj, states), inplace=True)
        _add_product(mlp.down_proj, sums, gates.mul_(_product(mlp.up_proj, states)), body.join)
    if not stage.is_last:
        stage.pass_on(sums)
        return sums
    return _normalise(body.norm, sums)


def _attention(module: Any, states: Tensor, rotation: tuple[Tensor, Tensor], flat: FlatTokens) -> Tensor:
    """Computes attention [tokens, heads * size] of normalised states [tokens, width], before the output map.

    Queries, keys and values share one tensor, so that one rotation serves queries and keys.
    """
    size = module.head_dim
    maps = (module.q_proj, module.k_proj, module.v_proj)
    widths = [each.out_features for each in maps]
    joined = states.new_empty(len(states), sum(widths))
    for each, target in zip(maps, torch.split(joined, widths, 1), strict=True):
        if each.bias is None:
            torch.mm(states, each.weight.t(), out=target)
        else:
            torch.addmm(each.bias, states, each.weight.t(), out=target)
        _add_adapter(each, target, states)
    every = joined.view(len(states), -1, size)
    heads = widths[0] // size
    shared = (widths[0] + widths[1]) // size
    if hasattr(module, "q_norm"):
        for norm, part in ((module.q_norm, every[:, :heads]), (module.k_norm, every[:, heads:shared])):
            part.copy_(_normalise(norm, part))
    turned = _rotate(every[:, :shared], *rotation)
    columns = turned[:, :heads], turned[:, heads:], every[:, shared:]
    return attend(module.layer_idx, *columns, flat, module.scaling, module.rule).flatten(1)


def _rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Computes x cos + (-x2, x1) sin for x [tokens, heads, size] with the halves x1 and x2; sine has the sign."""
    return (states * cosine).addcmul_(states.roll(states.shape[-1] // 2, -1), sine)


def _normalise(module: Any, states: Tensor) -> Tensor:
    return rms_norm(states, module.weight.shape, module.weight, module.variance_epsilon)


def _product(module: Any, states: Tensor) -> Tensor:
    found = linear(states, module.weight, module.bias)
    _add_adapter(module, found, states)
    return found


def _add_product(module: Any, sums: Tensor, states: Tensor, join: Join | None) -> None:
    if join is None:
        sums.addmm_(states, module.weight.t())
    else:
        sums += join(torch.mm(states, module.weight.t()))
    if module.bias is not None:
        sums += module.bias
    _add_adapter(module, sums, states)


def _add_adapter(module: Any, sums: Tensor, states: Tensor) -> None:
    """Adds what the adapter of a layer adds to its output, in place; a layer without one is left alone."""
    if hasattr(module, "lora_A"):
        sums.addmm_(torch.mm(states, module.lora_A.t()), module.lora_B.t(), alpha=module.scale)
