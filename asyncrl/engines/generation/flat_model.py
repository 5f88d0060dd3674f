"""The model of the torch engine: loaded, cut to what this rank generates with, and computed over a flat row of tokens.

The model's own modules compute, or the fast path, which is written out here, where that knows the model. Models whose
attention the engine does not compute are refused: by their config where it tells, and by a comparison of logits where
nothing does.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from asyncrl.config.schema import Config
from asyncrl.engines.generation.attention import (
    NAME,
    AttentionRule,
    CachedBeginnings,
    DecodeBlocks,
    FlatTokens,
    KVCache,
    attend,
)
from asyncrl.engines.generation.block_pool import KV_BLOCK, Ints
from asyncrl.engines.models.lora import LowRankLinear
from asyncrl.engines.models.model_families import DIFFERS, RecordShape, attention_not_computed, not_computed
from asyncrl.engines.models.model_loading import OutputScaling, load_pretrained
from asyncrl.engines.models.model_shape import layers_of_stage
from asyncrl.engines.models.picture_input import FlatPictures
from asyncrl.engines.models.prompt_pictures import PromptPictures
from asyncrl.engines.models.router_replay import ChosenExperts
from asyncrl.engines.ranks.rank_limits import refusal_of_splitting
from asyncrl.engines.ranks.rank_mesh import RankMesh, Ranks
from asyncrl.errors import ConfigError
from asyncrl.lanes.weights.slot_memory import WeightsSpec

# The slices of its layers that each rank of a replica generates with, by the plan that the model comes with.
#
#     q, k, v, gate, up    some of the outputs: heads of attention, key-value heads, inner values
#     o, down              the weights of these inputs; ranks sum the outputs
#
# Embedding, norms and head are whole on every rank of a stage that has them (see LayerStage), so that all tensor
# ranks have the same states between these layers.


ALONE = RankMesh()
KEY = "generation.layout"

Join: TypeAlias = Callable[[Tensor], Tensor]
"""Sums what each rank has computed of the outputs of a layer."""


def cut_dims(model: Any) -> dict[str, int]:
    """Returns the dimension in which ranks cut each parameter of a transformers model; those that they hold whole are
    not there. Rank i of n has `chunk(n, dimension)[i]`."""
    prefix = f"{model.base_model_prefix}."
    plan = model.config.base_model_tp_plan
    found = dict[str, int]()
    for name, parameter in model.named_parameters():
        layer = name.removeprefix(prefix).rpartition(".")[0]
        style = next((style for pattern, style in plan.items() if fnmatchcase(layer, pattern)), "")
        if style == "colwise":
            found[name] = 0
        elif style == "rowwise" and parameter.ndim > 1:  # Its bias is added once, to the sum.
            found[name] = 1
    return found


def keep_slices(model: Any, ranks: Ranks) -> None:
    """Leaves a model, which the fast path computes, with the slices of this rank."""
    for name, dim in cut_dims(model).items():
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.chunk(ranks.size, dim)[ranks.rank].clone(memory_format=torch.contiguous_format)
        layer = model.get_submodule(name.rpartition(".")[0])
        layer.out_features, layer.in_features = layer.weight.shape


def join_of(ranks: Ranks, *, fixed: bool) -> Join | None:
    """Returns how ranks sum; None for one alone. fixed: always in rank order, where the order else depends on the place
    of a number in what is summed, and so on the row that a sequence has."""
    if ranks.size == 1:
        return None
    return (lambda values: reduce(torch.add, ranks.gather_equal(values))) if fixed else ranks.sum


def refuse_slices(model: Any, config: Config, ranks: RankMesh, *, fast: bool) -> None:
    """Raises ConfigError when several ranks cannot share out the layers of a model. fast: whether the fast path
    computes it."""
    if ranks.size == 1:
        return
    sizes = {"pp": ranks.stages.size, "tp": ranks.tensor.size}
    chosen = ", ".join(f"{axis} = {size}" for axis, size in sizes.items() if size > 1)
    one = ", ".join(f"{axis} = 1" for axis, size in sizes.items() if size > 1)
    name = config.model.name
    family = model.config.model_type
    if config.model.lora is not None:
        raise ConfigError(f"{KEY}: {chosen} cuts whole weights, and model.lora has adapters; write {one}")
    if not fast:
        raise ConfigError(
            f"{KEY}: {chosen} cuts plain Llama, Mistral, Qwen2 and Qwen3 models, and {name} is another "
            f"({family}); write {one}"
        )
    if refusal := refusal_of_splitting(model.config.to_dict(), ranks.tensor.size):
        raise ConfigError(f"{KEY}: {refusal}")


# The layers that each stage of a replica generates with, by the split of the trainer's stages.
#
# first stage    embedding, layers            ──┐ states [tokens, width]
# in between     layers                       <─┴──┐
# last stage     layers, last norm, head      <────┘ logits ──> all stages


@dataclass(frozen=True, eq=False)
class LayerStage:
    """One stage of a replica. layers: numbers of those that it computes. ranks: one of each stage, in order; all of
    them call the same methods in the same order, which raise PeerLost when another one is gone or late."""

    layers: range
    ranks: Ranks

    @classmethod
    def of(cls, layers: int, trained: int, ranks: Ranks) -> "LayerStage":
        """Joins the layers of consecutive stages of the trainer. layers: of the model. trained: stages of the trainer,
        a multiple of those here."""
        return cls(layers_of_stage(layers, trained, ranks.size, ranks.rank), ranks)

    @property
    def is_first(self) -> bool:
        return self.ranks.rank == 0

    @property
    def is_last(self) -> bool:
        return self.ranks.rank == self.ranks.size - 1

    def received(self, like: Tensor) -> Tensor:
        """Returns the states of the stage before. like: memory of their shape and dtype."""
        return self.ranks.moved(like, self.ranks.rank - 1, self.ranks.rank)

    def pass_on(self, states: Tensor) -> None:
        """Gives states to the next stage."""
        self.ranks.moved(states, self.ranks.rank, self.ranks.rank + 1)

    def from_last(self, values: Tensor) -> Tensor:
        """Returns the values of the last stage on all stages, which give tensors like it."""
        return self.ranks.shared(values, self.ranks.size - 1)


def keep_layers(model: Any, stage: LayerStage) -> None:
    """Frees the parameters of other stages in a model that the fast path computes. An embedding that is the head too
    is on the first and on the last stage."""
    body = model.base_model
    kept = [body.layers[number] for number in stage.layers]
    kept += [body.embed_tokens] if stage.is_first else []
    kept += [body.norm, model.get_output_embeddings()] if stage.is_last else []
    held = {id(parameter) for parameter in nn.ModuleList(kept).parameters()}
    for parameter in model.parameters():
        if id(parameter) not in held:
            parameter.data = torch.empty(0, dtype=parameter.dtype)


def of_stage(spec: WeightsSpec) -> WeightsSpec:
    """Returns the specification without the tensors that `keep_layers` has freed."""
    shapes = {each.name: each.shape for each in spec.tensors if prod(each.shape)}
    exact = [each.name for each in spec.tensors if each.exact]
    return WeightsSpec.of(shapes, spec.dtype, {alias: name for alias, name in spec.aliases if name in shapes}, exact)


# The fast path of generation: the forward of Llama-like models, written out over a flat row of tokens.
#
# Without the calls of transformers' modules, and with sums in place, a small model generates 1.16 times the tokens
# per second (docs/performance.md). The path reads the parameters of the model itself, so new weights need no copy.
# Its results are compared with those of the modules once per loaded model (`FlatModel.verify`).


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
        of_all = body.config.sliding_window if body.config.model_type == "mistral" else None
        window = getattr(layer.self_attn, "sliding_window", of_all)
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


NOTHING: Ints = np.zeros(0, np.int64)
NO_PREFILL: Mapping[int, Ints] = {}
NONE_HELD: Mapping[int, int] = {}
NO_PICTURES: Mapping[int, PromptPictures] = {}
PADDING = 2  # times that a sequence in prefill may be longer than another with which it is padded
PROBE_DECODED = 4  # tokens of the probe that are decoded one by one, after the others in prefill
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest difference to transformers, in nats: far above rounding and far below the effect of a wrong mask. It bounds
the maximum over log-probs in float32 and their mean in bfloat16, which rounds single unlikely tokens by more."""


class FlatModel:
    """Wraps a causal LM so that it attends with `flat_attention`. The wrapper owns the model and changes its config.

    fast: whether the fast path computes instead of the model's modules.

    Args:
        model: a transformers causal LM in evaluation mode.
        vocabulary: number of token ids; padding rows of the head from here on get the logit -inf.
        fixed: attend to all blocks of a slot, so that no sequence's length changes the shapes of another.
        float32_head: compute logits in float32, whatever the dtype of the model.
        blocks: of the KV cache; None has room for `limit` positions in every slot.
        record: of the experts that the routers choose, kept in the cache; None keeps none. Raises ConfigError as
            `routers_of`.
    """

    def __init__(
        self,
        model: Any,
        slots: int,
        limit: int,
        vocabulary: int,
        *,
        fixed: bool = False,
        float32_head: bool = False,
        blocks: int | None = None,
        record: RecordShape | None = None,
    ) -> None:
        self.model = model
        self.device: torch.device = model.device  # The property of transformers asks all parameters.
        self.slots = slots
        self.cache = KVCache(slots, limit, blocks=blocks, fixed=fixed)
        self._chosen = None if record is None else ChosenExperts(model, record)
        self.fast = is_llama_like(model)
        self._ranks = ALONE.tensor
        self._stage = LayerStage(range(len(model.model.layers) if self.fast else 0), ALONE.stages)
        self._vocabulary = vocabulary
        self._float32_head = float32_head
        self._scaling = OutputScaling.of(model.config)
        self._pictures = FlatPictures(model)
        has_encoder = model.config.get_text_config() is not model.config  # It attends to both sides, as it is.
        model.set_attn_implementation({"text_config": NAME} if has_encoder else NAME)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Must be called after the values or the tensors of the model's parameters changed."""
        head = self.model.get_output_embeddings()
        self._head = deepcopy(head).float() if self._float32_head else head
        join = join_of(self._ranks, fixed=self.cache.tables.fixed)
        self._body = bind_parameters(self.model.model, self.cache.limit, self._stage, join) if self.fast else None
        self._pictures.clear()

    def share_out(self, ranks: RankMesh, device: torch.device, trained: int = 1) -> None:
        """Keeps the layers of this rank's stage, and its slices of them, on a device, where it computes from now on
        together with the others. The fast path must know the model. trained: stages of the trainer."""
        self._ranks = ranks.tensor
        self._stage = LayerStage.of(self.model.config.num_hidden_layers, trained, ranks.stages)
        keep_slices(self.model, ranks.tensor)
        keep_layers(self.model, self._stage)
        self.model.to(device)
        self.device = device
        self.weights_changed()

    def put_away(self) -> None:
        """Frees keys and values, and what was made from parameters, until `weights_changed` is called."""
        self.cache.free_memory()
        self._pictures.clear()
        self._head = self._body = None

    @torch.no_grad()
    def logits(
        self,
        tokens: Ints,
        positions: Ints,
        prefill: Mapping[int, Ints] = NO_PREFILL,
        held: Mapping[int, int] = NONE_HELD,
        slots: Ints | None = None,
        pictures: Mapping[int, PromptPictures] = NO_PICTURES,
    ) -> Tensor:
        """Returns the logits [rows, vocabulary] of the next token of each sequence, in float32 or the model's dtype.

        tokens, positions: [decoding], one new token of each of `slots`, None for the first slots. prefill: tokens of
        sequences without cached keys, by slot. held: positions of a slot that the cache has already; its sequence in
        `prefill` begins after them, and stands behind those without. Rows have this order. Slots get the blocks that
        they lack. pictures: of the prompts of these slots.
        """
        decoding = np.arange(len(positions)) if slots is None else slots
        lengths = [len(sequence) for sequence in prefill.values()]
        begin = [held.get(slot, 0) for slot in prefill]
        self._allocate(np.array([*decoding, *prefill]), np.array([*(positions + 1), *np.add(begin, lengths)]))
        # DecodeBlocks.of may move blocks, so it comes before `locations`.
        blocks = DecodeBlocks.of(self.cache, decoding, positions, self.device) if len(positions) else None
        rows = np.concatenate([decoding, np.repeat(list(prefill), lengths)]).astype(np.int64)
        steps = np.concatenate(
            [positions, *(np.arange(first, first + length) for first, length in zip(begin, lengths, strict=True))]
        )
        at, offsets = (self.tensor(each) for each in self.cache.locations(rows, steps))
        fresh = len(begin) - np.count_nonzero(begin)
        beginnings = self._beginnings(list(prefill)[fresh:], begin[fresh:], lengths[fresh:])
        flat = FlatTokens(self.cache, (at, offsets), self.tensor(steps), blocks, lengths[:fresh], beginnings)
        ids = self.tensor(np.concatenate([tokens, *prefill.values()]))
        last = np.concatenate([np.arange(len(tokens)), len(tokens) + np.cumsum(lengths, dtype=np.int64) - 1])
        layout = self._pictures.layout(ids, rows, steps, pictures) if pictures else _layout(ids, flat)
        logits = self._logits(layout, flat, self.tensor(last))
        if self._chosen is not None:
            self.cache.remember((at, offsets), self._chosen.taken())
        logits[:, self._vocabulary :] = -torch.inf
        return logits

    def _allocate(self, slots: Ints, lengths: Ints) -> None:
        for index in np.flatnonzero(self.cache.tables.counts[slots] * KV_BLOCK < lengths):
            self.cache.tables.allocate(int(slots[index]), int(lengths[index]))

    def _beginnings(self, slots: list[int], held: list[int], lengths: list[int]) -> tuple[CachedBeginnings, ...]:
        """Describes sequences that go on, in parts within which no sequence is more than PADDING times another."""
        assert all(held), "sequences without cached keys come first"
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        parts = list[CachedBeginnings]()
        part = slice(0, 0)
        for index, length in enumerate(map(sum, zip(held, lengths, strict=True))):
            first = held[part.start] + lengths[part.start]
            if max(first, length) > PADDING * min(first, length):
                parts.append(self._part(slots[part], held[part], lengths[part], like))
                part = slice(index, index)
            part = slice(part.start, index + 1)
        return (*parts, self._part(slots[part], held[part], lengths[part], like)) if slots else ()

    def _part(self, slots: list[int], held: list[int], lengths: list[int], like: Tensor) -> CachedBeginnings:
        return CachedBeginnings.of(self.cache, dict(zip(slots, held, strict=True)), lengths, like)

    def logits_after(self, tokens: Ints) -> Tensor:
        """Returns the logits [vocabulary] of the token after these, with a KV cache of its own."""
        with self._other_cache(KVCache(1, len(tokens))):
            return self.logits(NOTHING, NOTHING, {0: tokens})[0]

    def verify_whole(self, ids: Ints, expected: Tensor) -> None:
        """Verifies the whole model, as `verify` does, before layers are shared out, with a cache for the probe alone:
        that of this rank has room for its own heads."""
        with self._other_cache(KVCache(1, len(ids), fixed=self.cache.tables.fixed)):
            self.verify(ids, expected)

    def verify(self, ids: Ints, expected: Tensor) -> None:
        """Compares this forward, in prefill and decode, with `expected` from `probe_logprobs`.

        A fast path that differs is replaced by the modules. Raises ConfigError when they differ by more than rounding,
        or are no numbers.
        """
        if not torch.isfinite(expected).any():
            raise ConfigError("model.name: the model computes NaN: its weights hold NaN or infinity; take other files")
        tolerance = PROBE_TOLERANCE[self.model.dtype]
        if self.fast and not self._largest_difference(ids, expected) <= tolerance:
            self.fast = False
        if not self.fast and not (found := self._largest_difference(ids, expected)) <= tolerance:
            raise ConfigError(f"model.name: {not_computed(self.model.config.model_type, DIFFERS.format(found))}")

    @contextmanager
    def _other_cache(self, cache: KVCache) -> Iterator[None]:
        own = self.cache
        self.cache = cache
        try:
            yield
        finally:
            self.cache = own

    def tensor(self, values: NDArray[Any]) -> Tensor:
        """Copies an array to the device of the model."""
        return torch.from_numpy(values).to(self.device)

    def _logits(self, layout: Mapping[str, Tensor], flat: FlatTokens, last: Tensor) -> Tensor:
        if self.fast or self._float32_head:
            states = self._states(layout, flat, last)
            head = self._head
            if self._stage.is_last:
                logits = self._scaling.apply(head(states.to(head.weight.dtype)))
            else:
                logits = head.weight.new_empty((len(last), head.out_features))
            logits = self._stage.from_last(logits)
        else:
            logits = self.model(**layout, logits_to_keep=last, use_cache=False, flat=flat).logits[0]
        return logits

    def _states(self, layout: Mapping[str, Tensor], flat: FlatTokens, last: Tensor) -> Tensor:
        if self.fast:
            return llama_states(self._body, layout["input_ids"][0], flat, last)
        states: Tensor = self.model.base_model(**layout, use_cache=False, flat=flat).last_hidden_state
        return states[0, last]

    def _largest_difference(self, ids: Ints, expected: Tensor) -> float:
        """Returns the difference of log-probs as PROBE_TOLERANCE counts it, without offsets common to all tokens."""
        prefill = len(ids) - PROBE_DECODED
        found = [self.logits(NOTHING, NOTHING, {0: ids[:prefill]})]
        for position in range(prefill, len(ids)):
            found.append(self.logits(ids[position : position + 1], np.array([position])))
        self.cache.tables.free(0)
        real = torch.isfinite(found[0][0])
        difference = (torch.cat(found).float()[:, real] - expected[:, real]).float()
        spread = (difference - difference.mean(-1, keepdim=True)).abs()
        return float(spread.max() if self.model.dtype == torch.float32 else spread.mean())


def _layout(ids: Tensor, flat: FlatTokens) -> dict[str, Tensor]:
    """Returns what the model gets of tokens: ids and positions, [1, tokens]."""
    return {"input_ids": ids[None], "position_ids": flat.positions[None]}


def load_model(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """Loads a model for sampling. Raises ConfigError when the engine does not compute its attention."""
    model = load_pretrained(folder, dtype=dtype)
    if reason := attention_not_computed(model.config.to_dict()):
        raise ConfigError(f"model.name: {not_computed(model.config.model_type, reason)}")
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def probe_logprobs(model: Any, ids: Ints) -> Tensor:
    """Returns log-probs of the model's own forward over the probe `ids`; must run before its attention is replaced."""
    tokens = torch.from_numpy(ids).to(model.device)
    compared = PROBE_DECODED + 1  # A long probe has no logits of all its tokens at once.
    logits: Tensor = model(input_ids=tokens[None], use_cache=False, logits_to_keep=compared).logits[0]
    return logits.float().log_softmax(-1)
