"""Estimates the bytes that a worker samples with, and those of a trainer's rank that samples too, phase by phase.

start       what it trains, the model as it is read from files, and what it gathers of other ranks
gathering   weights and moments, what it gathers, and the buckets in which that arrives
sampling    weights and moments, what it has gathered, keys and values, sampled tokens
step        weights, moments, gradients, a micro-batch; what it samples with is freed, but for frozen weights
"""

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import Config
from asyncrl.config.sections.training.layout_config import AnyLayout
from asyncrl.deploy.checks.row_lengths import RowLengths
from asyncrl.deploy.checks.training_memory import prompt_patches
from asyncrl.engines.model_shape import BYTES, FLOAT, Shape, layers_of_stage
from asyncrl.engines.models.model_folder import longest_row

CHUNK = 32
"""Positions in a block of the KV cache (generation/scheduling/block_pool.py)."""
BYTES_PER_SAMPLED = 12
"""Token, log-prob and version of each token that a slot may sample (generation/scheduling/running_batch.py)."""
BUCKET_BYTES = 32 << 20
"""Bytes of one rank that are gathered at once, or of one larger tensor (training/ranks/weight_gathering.py)."""
KEPT_PICTURES = 16
"""Prompts whose pictures stay computed (pictures/model_input.py)."""

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
    return max(min(BUCKET_BYTES, size // ranks), min(size, largest) // ranks)
