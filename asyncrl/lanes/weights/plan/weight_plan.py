"""The plan of a transfer of weights: which rank sends which part of which tensor to whom.

Trainer and generator compute it from the same placements and compare digests before weights move. Every byte that a
rank needs and does not hold reaches it once, which is the least that any plan moves. Weights of one layer are one wave;
waves follow each other in the order in which a forward pass reads them.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from math import prod

import numpy as np

from asyncrl.errors import WeightsError
from asyncrl.lanes.weights.plan.placements import (
    CheckpointTensor,
    Ints,
    Mesh,
    Placement,
    Replicate,
    Shard,
    flat_shards,
)
from asyncrl.lanes.weights.plan.routes_of_parts import (
    NOBODY,
    Line,
    Loads,
    Pattern,
    Route,
    make_line,
    make_pattern,
)
from asyncrl.protocols.rank_layout import Layout

BUCKET_BYTES = 32 << 20
"""Bytes of a bucket by default: networks of GPUs need 32 to 256 MB for their full rate, and buckets are staged."""

GRAINS = 64
"""Pieces in which the bytes of an average sender are placed, so that none sends over about 1 / 64 more than it must."""

ROUTES = 64
"""Routes of a plan where there is a choice, and at most one more for each pattern. More would balance no better; fewer
would cut small tensors into smaller parts."""

FORMAT = 1
"""Counts the changes of the algorithm that change plans: both sides need the same one."""


@dataclass(frozen=True, eq=False, slots=True)
class PlannedTensor:
    """Holds the plan of one tensor. wave: its layer's place in the order of layers."""

    tensor: CheckpointTensor
    wave: int
    pattern: Pattern
    line: Line
    route: Route


@dataclass(frozen=True, eq=False, slots=True)
class Traffic:
    """Counts bytes by rank: sent as a holder, relayed as a receiver, received, copied within its own memory. holders:
    the ranks that hold weights of the source."""

    sent: Ints
    relayed: Ints
    received: Ints
    copied: Ints
    holders: tuple[int, ...]

    @property
    def moved(self) -> int:
        """Returns the bytes that cross between ranks."""
        return int(self.sent.sum() + self.relayed.sum())

    @property
    def sender_balance(self) -> float:
        """Returns the bytes of the holder that sends most over those of the mean holder; 1 if nothing is sent."""
        total = int(self.sent.sum())
        return float(self.sent.max()) * len(self.holders) / total if total else 1.0

    @property
    def busiest(self) -> int:
        """Returns the bytes of the rank that sends or receives most, where both directions work at once."""
        return int(max((self.sent + self.relayed).max(), self.received.max()))


@dataclass(frozen=True)
class PlanSummary:
    """Says in text what a plan is made of, a line for each placement and tensor. Sides compare `digest` and exchange
    the lines only when it differs."""

    lines: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """Returns the SHA-256 of the lines, 64 hexadecimal digits."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    def check(self, other: "PlanSummary", *, ours: str = "trainer", theirs: str = "generator") -> None:
        """Raises WeightsError with the first line that differs, unless both sides have the same plan."""
        if self.digest == other.digest:
            return
        pairs = zip((*self.lines, "nothing more"), (*other.lines, "nothing more"), strict=False)
        number, (mine, other_line) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
        raise WeightsError(
            f"{ours} and {theirs} have different plans for the weights; the first difference is line {number}: the "
            f"{ours} has {_near(mine, other_line)!r}, the {theirs} {_near(other_line, mine)!r}. Start both with the "
            "same model folder, layouts and version of asyncrl"
        )


@dataclass(frozen=True, eq=False, slots=True)
class WeightPlan:
    """Holds the plan of all tensors, in the order of waves. copies: of a part that leave its holders at most. ranks:
    the number of the largest rank, plus one."""

    tensors: tuple[PlannedTensor, ...]
    copies: int
    bucket_bytes: int
    ranks: int
    traffic: Traffic
    summary: PlanSummary

    @property
    def digest(self) -> str:
        return self.summary.digest

    @property
    def least_sent(self) -> float:
        """Returns a bound of the bytes of the holder that sends most: what only a set of ranks holds, they must send
        among them, whatever the plan."""
        bytes_of: dict[frozenset[int], int] = defaultdict(int)
        for pattern, (line, count) in self._kinds().items():
            for ranks, elements in zip(pattern.holders.tolist(), np.diff(line.cell_start).tolist(), strict=True):
                bytes_of[frozenset(ranks) - {NOBODY}] += elements * pattern.item_bytes * count
        sums = [sum(size for inner, size in bytes_of.items() if inner <= outer) / len(outer) for outer in bytes_of]
        return max([*sums, sum(bytes_of.values()) / max(len(self.traffic.holders), 1)])

    def _kinds(self) -> dict[Pattern, tuple[Line, int]]:
        counts = Counter(each.pattern for each in self.tensors)
        return {each.pattern: (each.line, counts[each.pattern]) for each in self.tensors}


def make_plan(
    tensors: Sequence[CheckpointTensor],
    source: Mapping[str, Placement],
    destination: Mapping[str, Placement],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    copies: int | None = None,
) -> WeightPlan:
    """Plans the transfer of tensors from one placement to another; a rank that stands in both is the same process.

    Neither the order of tensors nor that of mappings matters. source, destination: placement of each tensor by name.
    copies: how many copies of a part leave its holders, at least 1; receivers pass on the others (None: as many as the
    holders can send in the time in which the busiest rank receives).

    Raises:
        WeightsError: ranks need what no source rank holds.
        ValueError: a name stands twice or has no placement, a placement does not fit its tensor, or a size is under 1.
    """
    if bucket_bytes < 1 or (copies is not None and copies < 1):
        raise ValueError(f"bucket_bytes and copies are at least 1, not {bucket_bytes} and {copies}")
    ordered = _in_layer_order(tensors)
    placements, ends = _numbered(ordered, source, destination)
    kinds = _patterns(ordered, ends, placements)
    counts = Counter(kinds)
    ranks = 1 + max((pattern.largest_rank for pattern in counts), default=-1)
    holders = sorted({rank for p in counts for rank in p.holders.ravel().tolist()} - {NOBODY})
    copies = copies or _copies(counts, ranks, len(holders))
    lines = {pattern: make_line(pattern, copies) for pattern in counts}
    loads = Loads(ranks, copies, _grain(counts, lines, len(holders)))
    routes = _routes(kinds, lines, loads, copies)
    waves = [wave for wave, (_, group) in enumerate(groupby(ordered, lambda each: layer(each.name))) for _ in group]
    planned = tuple(
        PlannedTensor(tensor, wave, pattern, lines[pattern], route)
        for tensor, wave, pattern, route in zip(ordered, waves, kinds, routes, strict=True)
    )
    received = sum((pattern.received(ranks) * count for pattern, count in counts.items()), start=np.zeros(ranks, int))
    copied = sum((pattern.copied(ranks) * count for pattern, count in counts.items()), start=np.zeros(ranks, int))
    traffic = Traffic(loads.sent[:ranks], loads.relayed[:ranks], received, copied, tuple(holders))
    head = f"format {FORMAT}, {copies} copies, buckets of {bucket_bytes} bytes"
    return WeightPlan(planned, copies, bucket_bytes, ranks, traffic, _summary(head, planned, placements, ends))


# ---- order of tensors ---------------------------------------------------------------------------------------

NUMBER = re.compile(r"\.(\d+)\.")
FIRST = re.compile(r"embed|wte|wpe")


def layer(name: str) -> tuple[int, int]:
    """Returns a key that sorts tensors by layer: embeddings first, then the numbered layers, then norm and head."""
    if numbered := NUMBER.search(name):
        return 1, int(numbered[1])
    return (0, 0) if FIRST.search(name) else (2, 0)


def _in_layer_order(tensors: Sequence[CheckpointTensor]) -> list[CheckpointTensor]:
    ordered = sorted(tensors, key=lambda tensor: (layer(tensor.name), tensor.name))
    twice = [one.name for one, other in pairwise(ordered) if one.name == other.name]
    if twice:
        raise ValueError(f"tensors stand twice in the list: {', '.join(twice)}")
    return ordered


# ---- patterns -----------------------------------------------------------------------------------------------

Ends = list[tuple[int, int]]
"""Numbers of the source and the destination placement of each tensor."""


def _numbered(
    ordered: Sequence[CheckpointTensor], source: Mapping[str, Placement], destination: Mapping[str, Placement]
) -> tuple[list[Placement], Ends]:
    """Returns all placements in the order of their first use, and which of them each tensor has."""
    numbers: dict[Placement, int] = {}
    ends: Ends = []
    for tensor in ordered:
        if tensor.name not in source or tensor.name not in destination:
            side = "source" if tensor.name not in source else "destination"
            raise ValueError(f"{tensor.name} has no placement at the {side}; a tensor that no rank has is at Boxes(())")
        first = numbers.setdefault(source[tensor.name], len(numbers))
        ends.append((first, numbers.setdefault(destination[tensor.name], len(numbers))))
    return list(numbers), ends


def _patterns(ordered: Sequence[CheckpointTensor], ends: Ends, placements: Sequence[Placement]) -> list[Pattern]:
    """Returns the pattern of each tensor; the same object for tensors of the same shape, dtype and placements."""
    known: dict[tuple[tuple[int, ...], int, int, int], Pattern] = {}
    found = []
    for tensor, (source, destination) in zip(ordered, ends, strict=True):
        key = tensor.shape, tensor.item_bytes, source, destination
        try:
            if key not in known:
                known[key] = make_pattern(tensor.shape, tensor.item_bytes, placements[source], placements[destination])
        except WeightsError as unheld:
            raise WeightsError(f"{tensor.name}: {unheld}") from None
        except ValueError as unfit:
            raise ValueError(f"{tensor.name}: {unfit}") from None
        found.append(known[key])
    return found


def _copies(counts: Mapping[Pattern, int], ranks: int, holders: int) -> int:
    """Returns how many copies the holders can send while the busiest rank receives, if they share the work evenly and
    may take 5 % longer."""
    received = sum((pattern.received(ranks) * count for pattern, count in counts.items()), start=np.zeros(ranks, int))
    unique = sum(pattern.unique_bytes * count for pattern, count in counts.items())
    most = max((int(pattern.sizes.max(initial=0)) for pattern in counts), default=0)
    if not unique:
        return 1
    return max(1, min(most, int(received.max()) * holders * 21 // (20 * unique)))


def _grain(counts: Mapping[Pattern, int], lines: Mapping[Pattern, Line], holders: int) -> int:
    total = sum(int(lines[pattern].start[-1]) * pattern.item_bytes * count for pattern, count in counts.items())
    return max(1, total // (max(holders, 1) * GRAINS))


def _routes(kinds: Sequence[Pattern], lines: Mapping[Pattern, Line], loads: Loads, copies: int) -> list[Route]:
    """Chooses senders and relays, first of the tensors with the least choice and the most bytes. Tensors of a pattern
    share a route, all of them if there is no choice, else a batch."""
    keys = {p: (p.holders.shape[1], -int(lines[p].start[-1]) * p.item_bytes) for p in lines}
    members: dict[Pattern, list[int]] = defaultdict(list)
    for index, pattern in enumerate(kinds):
        members[pattern].append(index)
    routes: dict[int, Route] = {}
    for pattern in sorted(members, key=lambda each: (keys[each], members[each])):
        same = members[pattern]
        batches = 1 if pattern.without_choice(copies) else max(1, len(same) * ROUTES // len(kinds))
        size = -(-len(same) // batches)
        for start in range(0, len(same), size):
            batch = same[start : start + size]
            routes.update(dict.fromkeys(batch, loads.route(pattern, lines[pattern], len(batch))))
    return [routes[index] for index in range(len(kinds))]


# ---- summary ------------------------------------------------------------------------------------------------


def _summary(head: str, planned: Sequence[PlannedTensor], placements: Sequence[Placement], ends: Ends) -> PlanSummary:
    hashes: dict[int, str] = {}
    lines = [head, *(f"placement {number}: {placement}" for number, placement in enumerate(placements))]
    for each, (source, destination) in zip(planned, ends, strict=True):
        if id(each.route) not in hashes:
            hashes[id(each.route)] = _route_hash(each.route)
        tensor = each.tensor
        lines.append(
            f"{tensor.name} {tensor.dtype} {tensor.shape} wave {each.wave} from placement {source} to {destination} "
            f"route {hashes[id(each.route)]}"
        )
    return PlanSummary(tuple(lines))


def _route_hash(route: Route) -> str:
    found = hashlib.sha256()
    for array in (route.senders, route.cuts, route.order):
        found.update(f"{array.shape}".encode())
        found.update(array.astype("<i8", copy=False).tobytes())
    return found.hexdigest()[:16]


def _near(line: str, other: str, width: int = 160) -> str:
    """Returns the part of a long line around the first character in which it differs from another."""
    differs = next((n for n, (a, b) in enumerate(zip(line, other, strict=False)) if a != b), min(len(line), len(other)))
    start = max(0, differs - width // 2)
    return f"{'...' if start else ''}{line[start : start + width]}{'...' if start + width < len(line) else ''}"


# Placements of a decoder under a parallel layout, written as `tp2.pp2.dp2`, `fsdp8`, `zero8` or `dp2.fsdp4`.
#
#     dp    replicas                                     pp    stages of consecutive layers, which own their tensors
#     fsdp  rows of every tensor, after a cut by tp      zero  flat ranges of every tensor (ZeRO-3)
#     ep    experts, of which each rank owns some        tp    columns and rows as in Megatron-LM, whole heads
#
# Ranks count dp outermost, then pp, fsdp or zero, ep, and tp fastest, as in HybridFlow 5.3, in whatever order the
# axes are written. Key and value heads are replicated where tp is larger than their number, as vLLM does.


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
