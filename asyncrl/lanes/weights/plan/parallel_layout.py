"""Placements of a decoder under a parallel layout, written as `tp2.pp2.dp2`, `fsdp8`, `zero8` or `dp2.fsdp4`.

    dp    replicas                                     pp    stages of consecutive layers, which own their tensors
    fsdp  rows of every tensor, after a cut by tp      zero  flat ranges of every tensor (ZeRO-3)
    ep    experts, of which each rank owns some        tp    columns and rows as in Megatron-LM, whole heads

Ranks count dp outermost, then pp, fsdp or zero, ep, and tp fastest, as in HybridFlow 5.3, in whatever order the axes
are written. Key and value heads are replicated where tp is larger than their number, as vLLM does.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from asyncrl.lanes.weights.plan.index_boxes import Ints
from asyncrl.lanes.weights.plan.placements import (
    CheckpointTensor,
    Mesh,
    Placement,
    Replicate,
    Shard,
    flat_shards,
)
from asyncrl.lanes.weights.plan.weight_plan import layer
from asyncrl.protocols.rank_layout import Layout

AXES = ("dp", "pp", "fsdp", "zero", "ep", "tp")
FORMS = "a layout is axes with their sizes, joined by dots, as tp2.pp2.dp2, fsdp8, dp2.fsdp4, zero8 or ep4.tp2"

COLUMN_CUT = frozenset(["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head"])
ROW_CUT = frozenset(["o_proj", "down_proj", "w2"])
WHOLE = frozenset(["gate", "router"])
EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Holds the sizes of a model that decide what a layout may cut."""

    layers: int
    heads: int
    kv_heads: int
    experts: int = 0


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Holds the size of each axis. Raises ValueError for sizes under 1, and axes that exclude each other."""

    dp: int = 1
    pp: int = 1
    fsdp: int = 1
    zero: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if min(self.sizes) < 1:
            raise ValueError(f"every axis of a layout has a size of at least 1; {FORMS}")
        if self.zero > 1 and self.fsdp * self.ep * self.tp > 1:
            raise ValueError("zero cuts whole tensors: it goes with dp and pp, not with fsdp, ep or tp")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the sizes in the order of AXES."""
        return self.dp, self.pp, self.fsdp, self.zero, self.ep, self.tp

    @property
    def size(self) -> int:
        return prod(self.sizes)


def parse_layout(text: str) -> ParallelLayout:
    """Reads a layout. Raises ValueError, with the accepted forms, for anything else."""
    sizes: dict[str, int] = {}
    for term in text.split("."):
        matched = re.fullmatch(r"([a-z]+)(\d+)", term)
        if not matched or matched[1] not in AXES or matched[1] in sizes:
            reason = "stands twice" if matched and matched[1] in sizes else f"is none of {', '.join(AXES)} with a size"
            raise ValueError(f"layout {text!r}: {term!r} {reason}; {FORMS}")
        sizes[matched[1]] = int(matched[2])
    return ParallelLayout(**sizes)


def place_model(
    tensors: Sequence[CheckpointTensor], model: DecoderSizes, layout: ParallelLayout, ranks: Sequence[int]
) -> dict[str, Placement]:
    """Returns the placement of each tensor by name. ranks: one for each place of the layout, tp fastest.

    Raises ValueError when the model cannot be cut so, or no rule says how tp cuts a tensor.
    """
    _check_sizes(model, layout)
    assert len(ranks) == layout.size, f"{len(ranks)} ranks for a layout of {layout.size}"
    places = np.array(ranks, np.int64).reshape(layout.sizes)
    made: dict[tuple[int, int | None, str, int, tuple[int, ...]], Placement] = {}
    found: dict[str, Placement] = {}
    for tensor in tensors:
        expert = EXPERT.search(tensor.name)
        owner = int(expert[1]) * layout.ep // model.experts if expert and model.experts else None
        kind = _kind(tensor, model, layout)
        flat = tensor.shape if layout.zero > 1 else ()
        key = _stage(tensor.name, model, layout), owner, kind, len(tensor.shape), flat
        if key not in made:
            made[key] = _place(tensor, places[:, key[0]], owner, kind, layout, model)
        found[tensor.name] = made[key]
    return found


def generation_ranks(training: ParallelLayout, generation: ParallelLayout) -> tuple[int, ...]:
    """Returns the ranks of generation replicas on the ranks that train, so that each rank's training shard is a part of
    its generation shard (HybridFlow 5.3). Raises ValueError for layouts in which that cannot be."""
    if training.sizes[2:5] + generation.sizes[2:5] != (1,) * 6 or training.size != generation.size:
        raise ValueError("strided ranks need layouts of tp, pp and dp on both sides, with equally many ranks")
    regrouped = Layout(training.pp, training.tp, training.dp, generation.pp, generation.tp)
    return tuple(rank for replica in regrouped.generation_replicas() for rank in replica)


def _check_sizes(model: DecoderSizes, layout: ParallelLayout) -> None:
    if layout.pp > model.layers:
        raise ValueError(f"pp{layout.pp} has more stages than the model has layers, {model.layers}")
    if model.heads % layout.tp or (model.kv_heads % layout.tp and layout.tp % model.kv_heads):
        raise ValueError(
            f"tp{layout.tp} would cut through heads: the model has {model.heads} heads and {model.kv_heads} heads of "
            "keys and values; tp must divide the first, and divide the second or be a multiple of it"
        )
    if layout.ep > 1 and not model.experts:
        raise ValueError(f"ep{layout.ep} would spread experts over ranks, and the model has none: leave it out")
    if model.experts % layout.ep:
        raise ValueError(f"ep{layout.ep} must divide the number of experts, which is {model.experts}")


def _stage(name: str, model: DecoderSizes, layout: ParallelLayout) -> int:
    """Returns the pipeline stage that owns a tensor: embeddings the first one, norm and head the last one."""
    place, number = layer(name)
    per_stage = -(-model.layers // layout.pp)
    return (0, min(number // per_stage, layout.pp - 1), layout.pp - 1)[place]


def _kind(tensor: CheckpointTensor, model: DecoderSizes, layout: ParallelLayout) -> str:
    """Returns how tp cuts a tensor: "columns", "kv", "rows" or "whole"."""
    module = tensor.name.split(".")[-2] if "." in tensor.name else tensor.name
    if module in COLUMN_CUT:
        return "kv" if module in {"k_proj", "v_proj"} and layout.tp > model.kv_heads else "columns"
    if module in ROW_CUT:
        return "rows" if len(tensor.shape) > 1 else "whole"
    if layout.tp > 1 and len(tensor.shape) > 1 and module not in WHOLE:
        raise ValueError(
            f"no rule says how tp{layout.tp} cuts {tensor.name}; there are rules for "
            f"{', '.join(sorted(COLUMN_CUT | ROW_CUT))}"
        )
    return "whole"


def _place(
    tensor: CheckpointTensor, places: Ints, owner: int | None, kind: str, layout: ParallelLayout, model: DecoderSizes
) -> Placement:
    """Places a tensor on the ranks (dp, fsdp, zero, ep, tp) of its stage."""
    if layout.zero > 1:
        return flat_shards(tensor.shape, places.reshape(layout.dp, layout.zero).tolist())
    experts = places if owner is None else places[:, :, :, owner : owner + 1]
    ranks = experts[:, :, 0].transpose(0, 2, 3, 1)  # dp, ep, tp, fsdp: a tensor is cut by tp before fsdp.
    stacked = ".experts." in tensor.name and owner is None
    outer: Shard | Replicate = Shard(0) if stacked and layout.ep > 1 else Replicate()
    inner: Shard | Replicate = Shard(0) if layout.fsdp > 1 else Replicate()
    if kind == "kv":
        ranks = ranks.reshape(*ranks.shape[:2], model.kv_heads, -1, ranks.shape[3])
        return Mesh.of(ranks, Replicate(), outer, Shard(0), Replicate(), inner)
    cuts: dict[str, Shard | Replicate] = {"columns": Shard(0), "rows": Shard(1), "whole": Replicate()}
    return Mesh.of(ranks, Replicate(), outer, cuts[kind], inner)
