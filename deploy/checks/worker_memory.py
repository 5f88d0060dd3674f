"""Estimates the bytes that a worker computes with: the most that a forward and a backward pass take beside weights,
gradients and moments, those of ZeRO, and what a worker samples with.

Counted in the values that torch keeps of a decoder-only transformer with gated feed-forward layers, for each token and
layer, where `model`, `queries`, `keys` and `inner` are widths:

    two norms: input, normalized, output     6 model, 4 where the norm is frozen
    attention: queries, keys, values, output 2 queries + 2 keys, twice as much where these are normalized
    feed-forward: gate, activation, up, product  4 inner
    k experts, in place of feed-forward      k (4 inner + 2 model)
    while a layer is computed backward       3 inner + model, of k experts k times as many
    head, for each sampled token of a chunk  3 vocabulary
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import Config, TrainingConfig
from asyncrl.config.sections.training_config import BUCKET, AnyLayout, DeepspeedConfig
from asyncrl.deploy.checks.run_prompts import RowLengths
from asyncrl.engines.models.model_families import WORTH, is_shared, shared_from
from asyncrl.engines.models.model_folder import longest_row
from asyncrl.engines.models.model_shape import BYTES, FLOAT, EncoderShape, Shape, layers_of_stage

NORMS = 6
FROZEN_NORMS = 4
HEAD_COPIES = 3
"""Logits, their log-softmax, and the gradient or the probabilities."""
KEPT_SHARE = 0.8
KEPT_BELOW = 32 * 2**20
"""glibc's malloc returns tensors of more bytes than the latter to the system at once. Smaller ones, whose sizes differ
from step to step, leave holes in the heap: measured, a process keeps 1.8 times what torch has at one moment."""
BUCKET_BYTES = 32 * 2**20
"""Bytes of gradients that are summed at once (engines/training/optimizer.py), or of one larger tensor."""
OUTSIDE = 3
"""Hidden states outside of layers: embedded tokens, the last norm, and its gradient."""


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One micro-batch. tokens: with padding. sampled: those that logits are computed of. queries, keys: tokens
    whose queries, or keys and values, the attention of a packed row collects; 0 where rows are padded. next_part:
    tokens of the next one of its update, which finds gradients of this one, as a part of these; 0 where there is none.
    patches: of the pictures of all its prompts. pixels: bytes of the pictures of all prompts of a step, and once more
    of this micro-batch."""

    tokens: int
    sampled: int
    queries: int = 0
    keys: int = 0
    next_part: float = 1.0
    patches: int = 0
    pixels: int = 0

    def of_slice(self, ranks: int) -> "ForwardPass":
        """Returns the part of one of several ranks that share out the tokens; all sampled ones may be in its slice."""
        tokens = -(-self.tokens // ranks)
        return replace(self, tokens=tokens, sampled=min(tokens, self.sampled))

    @property
    def next(self) -> "ForwardPass":
        """Returns the next micro-batch of the update."""
        names = ("tokens", "sampled", "queries", "keys", "patches")
        return replace(self, **{name: math.ceil(self.next_part * getattr(self, name)) for name in names})


def largest_pass(config: Config, lengths: RowLengths, ranks: int = 1) -> ForwardPass:
    """Returns the largest micro-batch that these prompts may need, none of them shared. The shortest prompts leave
    room for most sampled tokens; those of the mean length count."""
    response = config.response_tokens
    samples = _samples(config, ranks)
    budget = config.training.micro_batch_tokens
    if config.task.pretrain:
        return ForwardPass(budget, budget)
    tokens = min(budget, samples * (lengths.longest + response))
    return ForwardPass(tokens, min(tokens, response * min(samples, -(-tokens // (lengths.mean + response)))))


def likely_pass(config: Config, shape: Shape, lengths: RowLengths, ranks: int = 1, device: str = "cpu") -> ForwardPass:
    """Returns the micro-batch of samples with prompts of the mean length and the longest answers."""
    largest = largest_pass(config, lengths, ranks)
    response = config.response_tokens
    members = _members(config)
    prompt = lengths.mean
    if not is_shared(prompt, members * response, members, shared_from(device)):
        members = 1
    samples = -(-_samples(config, ranks) // config.training.updates)
    count = min(samples, config.training.micro_batch_tokens // (prompt + response))
    if count < 2 or config.environment.use or config.task.pretrain:
        return largest
    next_part = min(1.0, samples / count - 1)
    answers = count * (response - 1)
    tokens = -(-count // members) * prompt + answers
    if shape.packs and tokens <= WORTH * (count * prompt + answers):
        keys = tokens + count * prompt
        return ForwardPass(tokens, count * response, keys if prompt < response else tokens, keys, next_part)
    return ForwardPass(count * prompt + answers, count * response, next_part=next_part)


def with_pictures(
    size: ForwardPass, config: Config, shape: Shape, lengths: RowLengths, ranks: int = 1, *, largest: bool = False
) -> ForwardPass:
    """Returns the micro-batch with the patches of its prompts, each of which is encoded once. The samples of a prompt
    are spread over ranks. largest: each sample may have another prompt, and all tokens of the longest prompt may be of
    pictures."""
    if shape.encoder is None or (lengths.rows and not lengths.patches):
        return size
    count = max(1, size.sampled // config.response_tokens)
    prompts = config.task.prompts_per_step
    samples = _samples(config, ranks)
    each = prompt_patches(shape.encoder, lengths, largest=largest)
    if largest:
        patches = min(shape.encoder.merge**2 * size.tokens, min(count, prompts) * each)
    else:
        patches = -(-count // -(-_members(config) // ranks)) * each
    pixels = FLOAT * shape.encoder.patch * (min(prompts, samples) * each + patches)
    return replace(size, patches=patches, pixels=pixels)


def prompt_patches(encoder: EncoderShape, lengths: RowLengths, *, largest: bool) -> int:
    """Returns the patches of the pictures of a prompt: in the mean, or the most that its tokens allow."""
    if lengths.rows and not (largest and lengths.patches):
        return lengths.patches
    return encoder.merge**2 * (lengths.longest if largest else lengths.mean)


def passes_of_update(config: Config, lengths: RowLengths, size: ForwardPass, ranks: int = 1) -> int:
    """Returns the micro-batches of one update."""
    tokens = _samples(config, ranks) * (lengths.mean + config.response_tokens)
    return max(1, -(-tokens // (size.tokens * config.training.updates)))


def stage_bytes(
    config: Config, shape: Shape, size: ForwardPass, stage: int, stages: int, passes: int, *, lora: bool, tp: int = 1
) -> tuple[int, int]:
    """Returns the most bytes of passes that a pipeline stage has begun and not computed backward, and those of torch's
    buffers for states and gradients of all passes. shape: of the stage."""
    begun = min(passes, stages - stage)
    is_last = stage == stages - 1
    sides = (stage > 0) + (not is_last)
    activations = pass_bytes(config, shape, size, lora=lora, head=is_last, tp=tp, begun=begun)
    return activations, sides * passes * size.tokens * FLOAT * shape.hidden


def _members(config: Config) -> int:
    return config.task.samples_per_prompt


def _samples(config: Config, ranks: int) -> int:
    """Returns the samples that a rank trains at most in one update."""
    return -(-config.task.prompts_per_step * _members(config) // ranks)


def pass_bytes(
    config: Config,
    shape: Shape,
    size: ForwardPass,
    *,
    lora: bool = False,
    head: bool = True,
    tp: int = 1,
    ep: int = 1,
    gathered: int = 0,
    begun: int = 1,
) -> int:
    """Returns the most bytes that the pass takes at one moment. lora: only adapters are trained. head: logits are
    computed, as the policy does. tp: ranks that share out what is inside of attention and feed-forward layers. ep:
    ranks that share out experts, to which the router gives as many tokens each. gathered: bytes of layers that are
    counted elsewhere, and are there with what a layer takes backward, but not with the logits. begun: passes whose
    activations are kept at one time."""
    training = config.training
    narrow = BYTES[training.precision]
    casts = 2 if training.precision == "bfloat16" else 0
    hidden = shape.hidden
    adapters = 0
    if lora and config.model.lora is not None:
        adapters = config.model.lora.rank * len(shape.adapted(config.model.lora))
    norms = FLOAT * (FROZEN_NORMS if lora else NORMS) * hidden
    heads = (shape.width("q_proj") + shape.width("k_proj")) // tp
    kept, computed = _feed_forward(shape, narrow, tp)
    inside = narrow * ((4 if shape.head_norms else 2) * heads + adapters) + kept
    layer = size.tokens * (norms + inside + casts * hidden) + _collected(shape, size, narrow, tp)
    backward = size.tokens * computed + _gradient_of_experts(shape, ep)
    output = size.tokens * FLOAT * OUTSIDE * hidden + (_head_bytes(config, shape, size, lora=lora) if head else 0)
    again = training.gradient_checkpointing
    # Rounded weights are kept until the backward pass is over, but for layers that are gathered and computed again.
    total = casts * (shape.outside + (1 if again and gathered else shape.layers) * shape.layer_parameters(tp, ep))
    if shape.encoder is not None:
        total += shape.encoder.kept_bytes(size.patches, narrow, again=again)
    if again:
        kept = size.tokens * FLOAT * hidden * shape.layers * begun
        return total + kept + max(layer + backward, output - gathered)
    return total + shape.layers * begun * layer + max(backward, output - gathered)


def _feed_forward(shape: Shape, narrow: int, tp: int) -> tuple[int, int]:
    """Returns the bytes for each token that the backward pass finds of what is inside of a feed-forward layer, and
    those that it takes while the layer is computed backward. Experts are computed in float32."""
    inner = shape.width("gate_proj") // tp
    hidden = shape.hidden
    if not shape.chosen:
        return narrow * 4 * inner, FLOAT * (3 * inner + hidden)
    return shape.chosen * FLOAT * (4 * inner + 2 * hidden), shape.chosen * FLOAT * (3 * inner + hidden)


def _collected(shape: Shape, size: ForwardPass, narrow: int, tp: int) -> int:
    """Returns the bytes of queries, outputs, keys and values that attention collects of a packed row, on a CPU."""
    return narrow * 2 * (size.queries * shape.width("q_proj") + size.keys * shape.width("k_proj")) // tp


def _gradient_of_experts(shape: Shape, ep: int) -> int:
    """Returns the bytes of the largest gradient of a pass that is not yet added to that of earlier ones: gate and up
    projections of all experts of a layer on this rank."""
    return FLOAT * shape.experts // ep * 2 * shape.width("gate_proj") * shape.hidden if shape.chosen else 0


def gathered_bytes(shape: Shape, tp: int, *, frozen: bool) -> int:
    """Returns the bytes of whole weights on a rank that holds shards: those outside of layers, and of layers. Where
    they learn, the gradients are whole too. frozen: only adapters learn."""
    return FLOAT * shape.outside * (1 if frozen else 2) + gathered_layers(shape, tp, frozen=frozen)


def gathered_layers(shape: Shape, tp: int, *, frozen: bool) -> int:
    """Returns the bytes of a layer while the next one is gathered, and of its gradients, which are copied to be
    summed."""
    return FLOAT * 2 * shape.layer_parameters(tp) * (1 if frozen else 2)


@dataclass(frozen=True, slots=True)
class ZeroMemory:
    """Counts the float32 numbers that a rank has of DeepSpeed's ZeRO (0.19.8). moments: numbers that the optimizer
    keeps of all weights.

        weights      all, in stage 3 a share
        gradients    a bucket of those that are exchanged; in stage 1 all; in stages 2 and 3 the sum of a share
        optimizer    a share of moments and of a copy of the weights, which they change
        gathered     in stage 3 weights outside of layers and one of a layer, and their gradients; and those that are
                     kept for the backward pass: of the layer that it computes again, else of all experts
        offloaded    of these what is in the memory of the host, and sums of gradients once more, for the optimizer
    """

    training: TrainingConfig
    shape: Shape
    moments: int

    @property
    def _settings(self) -> DeepspeedConfig:
        return self.training.deepspeed

    @property
    def _learnt(self) -> int:
        return self.shape.parameters

    @property
    def _share(self) -> int:
        return -(-self._learnt // self.training.layout.dp)

    @property
    def _kept(self) -> int:
        return self._share + -(-self.moments // self.training.layout.dp)

    @property
    def _table(self) -> int:
        """Returns the numbers of an embedding, the largest weight."""
        return self.shape.vocabulary * self.shape.hidden

    @property
    def _gathered(self) -> int:
        shape = self.shape
        gate = shape.experts * shape.hidden * shape.width("gate_proj")
        inside = 2 * gate if shape.chosen else gate
        if self.training.gradient_checkpointing:
            kept = shape.layer_parameters()
        else:
            kept = shape.layers * 3 * gate if shape.chosen else 0
        return 2 * (shape.outside + inside) + kept

    def on_device(self) -> dict[str, int]:
        """Returns the numbers on the device of the trainer by what takes them."""
        stage = self._settings.stage
        offload = self._settings.offload
        bucket = min(BUCKET, self._learnt)
        summed = 0 if offload else self._share
        found = {
            "weights": self._share if stage == 3 else self._learnt,
            # In stage 1 a share is summed in the step, when no bucket is needed.
            "gradients": self._learnt + max(bucket, summed) if stage == 1 else bucket + summed,
            "optimizer": 0 if offload else self._kept,
        }
        if stage == 3:
            return found | {"gathered": self._gathered}
        return found | ({"gathered": self._table} if offload else {})

    def growing(self) -> tuple[int, int]:
        """Returns the numbers of gradients that the first backward pass makes in stages 1 and 2, and those of the head
        among them: all, or the sum of a share."""
        if self._settings.stage == 1:
            return self._learnt, self._table
        return (0, 0) if self._settings.offload else (self._share, -(-self._table // self.training.layout.dp))

    def stepping(self) -> int:
        """Returns the numbers of a share that its optimizer step copies or computes, beside all that is kept, where
        these are more than its parts: gradients in one piece, and a denominator for each."""
        return 2 * self._share if self._settings.stage == 2 and not self._settings.offload else 0

    def on_host(self) -> int:
        """Returns the numbers that are offloaded into the memory of the host."""
        if not self._settings.offload:
            return 0
        sums = {1: 2 * self._share + self._table, 2: 3 * self._share + self._table, 3: 2 * self._share}
        return self._kept + sums[self._settings.stage]


def summed_bytes(shape: Shape, layout: AnyLayout, gradients: int) -> int:
    """Returns the bytes of a bucket of gradients, which copies of the weights sum after their passes. gradients: bytes
    of all; those of shards are summed in the passes."""
    if layout.shard > 1 or layout.dp * layout.sp * layout.ep == 1:
        return 0
    return min(gradients, max(BUCKET_BYTES, FLOAT * shape.vocabulary * shape.hidden))


def kept_bytes(config: Config, shape: Shape, size: ForwardPass, allocated: int, device: str) -> int:
    """Returns the bytes that a process on a CPU keeps beside those that a pass has allocated at one moment."""
    largest = max(
        size.tokens * max(shape.width("gate_proj"), shape.hidden),
        min(size.sampled, config.training.logits_chunk) * shape.vocabulary,
    )
    return int(KEPT_SHARE * allocated) if device == "cpu" and largest * FLOAT <= KEPT_BELOW else 0


def _head_bytes(config: Config, shape: Shape, size: ForwardPass, *, lora: bool) -> int:
    """Returns the bytes of the logits of one chunk. The head of several chunks is computed once more backward, with a
    gradient of its weights for each chunk."""
    chunk = config.training.logits_chunk
    several = size.sampled > chunk and not lora
    again = shape.vocabulary * shape.hidden * FLOAT if several else 0
    return HEAD_COPIES * min(chunk, size.sampled) * shape.vocabulary * FLOAT + again


# Estimates the bytes that a worker samples with, and those of a trainer's rank that samples too, phase by phase.
#
#     start       what it trains, the model as it is read from files, and what it gathers of other ranks
#     gathering   weights and moments, what it gathers, and the buckets in which that arrives
#     sampling    weights and moments, what it has gathered, keys and values, sampled tokens
#     step        weights, moments, gradients, a micro-batch; what it samples with is freed, but for frozen weights


CHUNK = 32
"""Positions in a block of the KV cache (engines/generation/block_pool.py)."""
BYTES_PER_SAMPLED = 12
"""Token, log-prob and version of each token that a slot may sample (engines/generation/running_batch.py)."""
GATHERED_BUCKET = 32 << 20
"""Bytes of one rank that are gathered at once, or of one larger tensor (engines/ranks/weight_gathering.py)."""
KEPT_PICTURES = 16
"""Prompts whose pictures stay computed (engines/models/picture_input.py)."""

Parts = dict[str, int]
"""Bytes by what takes them."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Counts the bytes of one replica of the torch engine, or of one of the ranks that share out its layers. workers:
    replicas that share out the groups in flight; 1 where one of them may have all. pp, tp: ranks of a replica. stage:
    shape of the stage that this rank samples with; None where it has all layers."""

    config: Config
    shape: Shape
    lengths: RowLengths
    workers: int = 1
    tp: int = 1
    pp: int = 1
    stage: Shape | None = None

    @property
    def number_bytes(self) -> int:
        return BYTES[self.config.model.dtype]

    @property
    def weights(self) -> int:
        return self.shape.parameters * self.number_bytes + self.head + self.adapters

    @property
    def head(self) -> int:
        """Returns the bytes of a copy of the head in float32."""
        model = self.config.model
        wants = model.float32_head and model.dtype == "bfloat16"
        return self.shape.vocabulary * self.shape.hidden * FLOAT if wants else 0

    @property
    def adapters(self) -> int:
        lora = self.config.model.lora
        return 0 if lora is None else self.shape.adapters(lora) * self.number_bytes

    @property
    def version(self) -> int:
        """Returns the bytes of what changes with each version."""
        if self.config.model.lora is not None:
            return self.adapters
        shape = self.stage or self.shape
        matrices = shape.layers * (shape.layer_parameters() - 2 * shape.hidden)
        return (shape.parameters - matrices + matrices // self.tp) * self.number_bytes

    def rows(self, *, largest: bool) -> Parts:
        """Returns what samples and prompts take: with prompts of the mean length, whose groups share blocks, or the
        most."""
        lengths = self.lengths
        cache = self._cache(lengths.longest if largest else lengths.mean, shared=not largest)
        found = {"cache": cache, "sampled tokens": self._sampled_tokens}
        pictures = self._pictures(largest=largest)
        return found | ({"pictures": pictures} if pictures else {})

    @property
    def least(self) -> Parts:
        """Returns what is taken however little is sampled."""
        return {"cache": self.reserved, "sampled tokens": self._sampled_tokens}

    @property
    def _sampled_tokens(self) -> int:
        generation = self.config.generation
        return generation.slots * generation.max_new_tokens * BYTES_PER_SAMPLED

    @property
    def reserved(self) -> int:
        """Returns the bytes that the cache takes at once. On a CPU it takes what is used, parked sequences with it;
        where all slots decode from the start, and on another device, all of it."""
        generation = self.config.generation
        if not generation.deterministic and generation.device == "cpu":
            return 0
        return self._within(generation.slots * -(-longest_row(self.config) // CHUNK))

    def _cache(self, prompt: int, *, shared: bool) -> int:
        """Returns the bytes of keys and values of all rows that run with prompts of so many tokens. shared: members of
        a group share the full blocks of their prompt, but for its last token."""
        config = self.config
        gate = GateConfig.of(self.config)
        slots = config.generation.slots
        rows = slots if config.environment.use else min(slots, self._groups * gate.members)
        blocks = rows * -(-(prompt + config.response_tokens) // CHUNK)
        if shared and not config.environment.use:
            blocks -= (rows - -(-rows // gate.members)) * (max(0, prompt - 1) // CHUNK)
        return max(self.reserved, self._within(blocks))

    def _pictures(self, *, largest: bool) -> int:
        """Returns the bytes of the pictures of all prompts in flight, of their states, which are kept of some, and of a
        pass of one prompt. largest: all tokens of the longest prompt may be of pictures."""
        encoder = self.shape.encoder
        lengths = self.lengths
        if encoder is None or (lengths.rows and not lengths.patches):
            return 0
        patches = prompt_patches(encoder, lengths, largest=largest)
        groups = self._groups
        states = min(KEPT_PICTURES, groups) * (patches // encoder.merge**2) * self.shape.hidden * self.number_bytes
        return states + groups * patches * encoder.patch * FLOAT + encoder.pass_bytes(patches, self.number_bytes)

    @property
    def _groups(self) -> int:
        """Returns the most groups in flight."""
        return -(-GateConfig.of(self.config).cap // self.workers)

    def _within(self, blocks: int) -> int:
        """Returns the bytes of so many blocks at the stage with the most layers, within `generation.cache_gb`."""
        layers = self.shape.layers
        held = len(layers_of_stage(layers, self.config.training.layout.pp, self.pp, 0))
        of_token = self.shape.cache_bytes_per_token // self.tp * held // layers
        size = blocks * CHUNK * of_token * self.number_bytes // FLOAT
        most = 10**9
        limit = self.config.generation.cache_gb
        return min(size, int(limit * most)) if limit else size


@dataclass(frozen=True, slots=True)
class SamplingRank:
    """Counts the bytes of a trainer's rank that samples between its steps, with all of the model or slices of it.
    stage: shape of its pipeline stage; number: of that stage. state: bytes that it keeps from step to step."""

    engine: EngineMemory
    layout: AnyLayout
    stage: Shape
    number: int
    state: Mapping[str, int]

    def phases(self, step: Parts, rows: Parts) -> dict[str, Parts]:
        """Returns the parts of each phase. step: those of a step without what the rank samples with. rows: what samples
        and prompts take."""
        engine = self.engine
        process = step["process"]
        kept = {"weights": self.state["weights"], "optimizer": self.state["optimizer"]}
        beside = {"gathered to sample": self._others, "held twice": self._twice}
        frozen = {"frozen to sample": engine.weights - engine.head - engine.adapters} if self._has_adapters else {}
        made, buckets = self._gathering
        found = {
            "step": step | frozen,
            "sampling": kept | frozen | beside | {"head": engine.head} | rows,
            "gathering": kept | frozen | {"gathered to sample": made, "buckets": buckets},
            "start": {"weights": kept["weights"], "read from files": engine.weights} | beside,
        }
        return {
            phase: {"process": process} | {name: size for name, size in parts.items() if size or phase == "step"}
            for phase, parts in found.items()
            if phase != "gathering" or made
        }

    @property
    def _has_adapters(self) -> bool:
        return self.engine.config.model.lora is not None

    @property
    def _held_apart(self) -> bool:
        """Returns whether all that is sampled with has memory of its own: it has another dtype, or is adapters."""
        return self.engine.number_bytes != FLOAT or self._has_adapters

    @property
    def _others(self) -> int:
        """Returns the bytes gathered of what this rank does not train, or does not hold as it samples with it."""
        own = 0 if self._held_apart else self.state["weights"]
        return max(0, self.engine.version - own)

    @property
    def _twice(self) -> int:
        """Returns the bytes that this rank trains and holds once more to sample with: shards, and the table of
        a head that is the embedding too at the last stage."""
        own = self.state["weights"]
        layout = self.layout
        stage = self.stage
        if self._held_apart:
            return 0
        if layout.shard > 1:
            return own
        table = stage.vocabulary * stage.hidden
        is_tied = self.engine.shape.outside < 2 * table
        gathers = self.engine.pp < layout.pp == self.number + 1
        return FLOAT * table if is_tied and gathers else 0

    @property
    def _slices(self) -> int:
        """Returns the bytes of the slices of this tensor rank, as it samples with them."""
        layers = self.stage.layers
        hidden = self.stage.hidden
        tp = self.layout.tp
        matrices = self.stage.layer_parameters() - 2 * hidden
        return 0 if tp == 1 else layers * matrices // tp * self.engine.number_bytes

    @property
    def _gathering(self) -> tuple[int, int]:
        """Returns the most bytes that are made while weights are gathered, and those of the buckets with the last of
        them: what this rank gives, and what it gets of each rank."""
        layout = self.layout
        size = self.engine.number_bytes
        if self._has_adapters:
            return 0, 0
        held = self.state["weights"] // FLOAT * layout.shard * size
        joined = held if layout.shard > 1 or size != FLOAT else 0
        table = self.stage.vocabulary * self.stage.hidden * size
        gate = self.stage.hidden * self.stage.width("gate_proj") * size // layout.tp
        of_shards = 0 if layout.shard == 1 else (1 + layout.shard) * _bucket(held, table, layout.shard)
        made = exchanged = 0
        if layout.tp > 1:
            parts = layout.tp // self.engine.tp  # Slices that a rank samples with.
            # Before its slices are made of it, a bucket is in memory twice: gloo has its own.
            made = self._slices * parts
            exchanged = (1 + parts) * _bucket(self._slices, gate)
            if parts == 1:
                made = exchanged = 0
        if layout.pp > self.engine.pp:
            made = self.engine.version
            exchanged = max(exchanged, 2 * _bucket(held, table))
        if of_shards >= made + exchanged:
            return joined, of_shards
        return joined + made, exchanged


def _bucket(size: int, largest: int, ranks: int = 1) -> int:
    """Returns the bytes of the largest bucket of tensors of so many bytes, of which each rank has a part."""
    return max(min(GATHERED_BUCKET, size // ranks), min(size, largest) // ranks)
