"""Estimates how many bytes each service of an experiment needs, from its config and the shape of its model, and the
shared memory of all; plans on which devices they lie, and finds those that are too small."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path

from asyncrl.config.gate_config import GateConfig
from asyncrl.config.install_hints import program
from asyncrl.config.placement import ONE_REPLICA, PlacedWorker, Placement, pool_key, pool_names, pools_of
from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config, CriticConfig, RewardConfig
from asyncrl.config.sections.training_config import AnyLayout, LayoutConfig, kept_numbers
from asyncrl.deploy.checks.machine import size_text
from asyncrl.deploy.checks.run_prompts import RowLengths, measured_lengths
from asyncrl.deploy.checks.worker_memory import (
    EngineMemory,
    ForwardPass,
    Parts,
    SamplingRank,
    ZeroMemory,
    gathered_bytes,
    gathered_layers,
    kept_bytes,
    largest_pass,
    likely_pass,
    pass_bytes,
    passes_of_update,
    prompt_patches,
    stage_bytes,
    summed_bytes,
    with_pictures,
)
from asyncrl.engines.generation.vllm.option_problems import cache_tokens
from asyncrl.engines.models.model_folder import longest_row
from asyncrl.engines.models.model_shape import BYTES, FLOAT, Shape, shape_of
from asyncrl.engines.models.prompt_pictures import picture_columns
from asyncrl.fleet.weight_transport import transport_of
from asyncrl.lanes.data.row_store import bytes_of_row, bytes_of_rows
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.batch import (
    Columns,
    episode_columns,
    expert_columns,
    reference_columns,
    sample_columns,
    token_reward_columns,
    value_columns,
)
from asyncrl.protocols.weight_transports import SLOTS
from asyncrl.rewards.execution.scoring import stores_token_rewards

PROCESS_BYTES = 300 * 2**20
PLAIN_BYTES = 110 * 2**20
"""A process with torch and transformers loaded; one without, with the two processes that run functions."""
GPU_PROCESS_BYTES = 500 * 2**20
"""CUDA takes so much of a GPU's memory for each process; a process of vLLM counts as much."""

OFFLOADED = "offloaded moments"
OFFERED = "copies of weights"
TAKEN = "received weights"
CHECKPOINTS = "copies for checkpoints"
"""Names of needs of no service: what DeepSpeed keeps in the memory of the host, versions of the weights at both ends of
their transport, and what is copied while a checkpoint is written."""
STATE = ("weights", "gradients", "optimizer", "gathered")
"""Parts of a trainer that are there however little is sampled."""
TO_SAMPLE = (
    "gathered to sample",
    "frozen to sample",
    "held twice",
    "head",
    "buckets",
    "read from files",
    "sampled tokens",
)
"""Further ones of a trainer whose ranks sample too."""
SMALLER = "take a smaller model (model.name)"
LESS_AT_ONCE = "take a smaller model (model.name), or train adapters (model.lora)"


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory of all workers of a service together. bytes: estimate of the most. least: bytes however little is sampled.
    lower: what to lower when that is too much. parts: bytes of each worker by what takes them. likely: bytes with
    prompts of the mean length; 0: as many as at most. phases: parts of each phase, where a worker has several in turn;
    `parts` are those of the largest. held: of a need that belongs to workers of other services, the bytes of each of
    them; others are of the workers of the service of this name, in equal shares."""

    name: str
    bytes: int
    least: int
    doc: str
    device: str = "cpu"
    lower: str = SMALLER
    parts: Mapping[str, int] = field(default_factory=dict)
    likely: int = 0
    phases: Mapping[str, Parts] = field(default_factory=dict)
    held: Mapping[PlacedWorker, int] = field(default_factory=dict)

    @property
    def expected(self) -> int:
        return self.likely or self.bytes

    @property
    def process(self) -> int:
        """Returns the bytes that a worker takes of its device before it has a model. Processes on a CPU share most of
        theirs; CUDA takes its own for each."""
        return 0 if self.device == "cpu" else self.parts.get("process", 0)

    def of_device(self, devices: int) -> int:
        """Returns the bytes that a plan compares with the memory of each of so many devices, with a worker each."""
        return max(self.expected, self.least + devices * self.process) // devices


def needs(config: Config, shape: Shape, lengths: RowLengths | None = None) -> list[MemoryNeed]:
    """Returns the memory that each service needs on its device. lengths: of prompts, by default the most that the
    config allows."""
    lengths = lengths or RowLengths.allowed(config)
    found = [_policy(config, shape, lengths), _scorer("reward", config.reward, shape)]
    if config.generation.colocate == "none":  # Else the need of the trainer has it.
        found.insert(0, generation_need(config, shape, lengths, "generation", config.generation.replicas))
    if config.environment.use:
        doc = "without the memory of your environment, which runs in processes of its own"
        found.append(MemoryNeed("environment", config.environment.replicas * PLAIN_BYTES, 0, doc))
    if config.reference_by_service:
        reference = config.reference
        found.append(frozen_need("reference", shape, reference.layout, reference.replicas, reference.device))
    if config.algorithm.advantage == "gae":
        found.append(_critic("critic", config, config.critic, shape, lengths))
    if config.algorithm.constraint == "lagrangian":
        critic = _critic("cost_critic", config, config.cost_critic, shape, lengths)
        found += [_scorer("cost", config.cost, shape), critic]
    if config.evaluate.is_on:
        found.append(generation_need(config, shape, lengths, "evaluation", config.evaluate.replicas))
    placement = Placement.of(config)
    copies = [*_copies_of_weights(config, shape, placement), *_copies_for_checkpoints(config, shape, placement)]
    return [*found, *_offloaded(config, shape, placement), *copies]


def _process_bytes(device: str) -> int:
    return PROCESS_BYTES if device == "cpu" else GPU_PROCESS_BYTES


def frozen_need(
    name: str, shape: Shape, layout: LayoutConfig, replicas: int, device: str, beside: str = ""
) -> MemoryNeed:
    """Estimates a service with frozen weights, of which a rank holds its part and gathers others for a pass. beside:
    what is to be said of them."""
    held = shape.outside + shape.layers * shape.layer_parameters(layout.tp)
    frozen = {"weights": -(-FLOAT * held // layout.shard)}
    if layout.shard > 1:
        frozen["gathered"] = gathered_bytes(shape, layout.tp, frozen=True)
    parts = {"process": _process_bytes(device), **frozen}
    ranks = replicas * layout.size
    doc = f"frozen weights{beside and f' {size_text(_sum(frozen))} a worker, {beside}'}"
    return MemoryNeed(name, ranks * _sum(parts), ranks * _sum(frozen), doc, device, parts=parts)


def version_bytes(config: Config, shape: Shape) -> int:
    """Returns the bytes of one version of the weights, or of the adapters, that the trainer publishes."""
    lora = config.model.lora
    dtype = config.model.dtype
    return (shape.parameters if lora is None else shape.adapters(lora)) * BYTES[dtype]


def _copies_of_weights(config: Config, shape: Shape, placement: Placement) -> Iterator[MemoryNeed]:
    """Yields the needs of versions of the weights where generation does not read them in place: those that the trainer
    offers, and those that each reader has taken over, on the host or GPU of each."""
    chosen = transport_of(config)
    transport = chosen.facts
    size = version_bytes(config, shape)
    if not transport.offered or not placement.readers:
        return
    offered = transport.offered
    taken = dict.fromkeys(placement.readers, transport.taken * size) if transport.taken else {}
    why = f"weights.transport is {chosen.name}"
    for name, held, doc in (
        (OFFERED, {placement.trainer: offered * size}, f"{offered} versions that the trainer offers: {why}"),
        (TAKEN, taken, f"{transport.taken} versions at each worker that reads them: {why}"),
    ):
        if held:
            device = config.training.device if transport.on == "gpu" else "cpu"
            yield MemoryNeed(name, sum(held.values()), sum(held.values()), doc, device, held=held)


def _copies_for_checkpoints(config: Config, shape: Shape, placement: Placement) -> Iterator[MemoryNeed]:
    """Yields the need of the weights and moments that trainer and critics copy while a checkpoint is written: ranks
    that hold parts of a model copy these, else the first one copies all."""
    if not config.training.background_checkpoints:
        return
    lora = config.model.lora
    each = kept_numbers(config.training.optimizer, config.training.optimizer_options)
    held: dict[PlacedWorker, int] = {}
    for service in (name for name in ONE_REPLICA if name in placement.workers):
        layout = placement.layouts[service]
        adapters = service == "training" and lora is not None
        learnt = shape.adapters(lora) if adapters and lora is not None else shape.parameters
        parts = 1 if adapters else layout.parts
        size = int(FLOAT * (1 + each) * learnt) // parts
        held |= dict.fromkeys(placement.workers[service][: parts * layout.sp : layout.sp], size)
    lower = "set training.background_checkpoints = false, so that steps wait"
    doc = "weights and moments once more"
    yield MemoryNeed(CHECKPOINTS, sum(held.values()), 0, doc, lower=lower, held=held)


def zero_memory(config: Config, shape: Shape) -> ZeroMemory:
    """Returns what ranks of the trainer have of DeepSpeed's ZeRO."""
    training = config.training
    moments = int(kept_numbers(training.optimizer, training.optimizer_options) * shape.parameters)
    return ZeroMemory(training, shape, moments)


def _offloaded(config: Config, shape: Shape, placement: Placement) -> list[MemoryNeed]:
    """Returns the need of what ranks on GPUs keep in the memory of their hosts."""
    training = config.training
    if not training.zero_stage or not training.deepspeed.offload or (training.device == "cpu" and not training.pool):
        return []
    held = dict.fromkeys(placement.workers["training"], FLOAT * zero_memory(config, shape).on_host())
    size = sum(held.values())
    lower = "set training.deepspeed.offload = false"
    doc = "moments, sums of gradients, and the weights that they change, of all ranks"
    return [MemoryNeed(OFFLOADED, size, size, doc, lower=lower, held=held)]


def generation_need(config: Config, shape: Shape, lengths: RowLengths, name: str, replicas: int) -> MemoryNeed:
    """Estimates workers that sample."""
    if not config.generation.engine_facts.is_own:
        return _vllm(config, shape, name, replicas)
    generation = config.generation
    engine = EngineMemory(config, shape, lengths)
    weights = engine.weights
    at_first = _sum(engine.least)
    rows = engine.rows(largest=True)
    doc = f"weights {size_text(weights)} and cache {size_text(engine.reserved)} to {size_text(rows['cache'])} a replica"
    lower = f"lower generation.slots, which is {generation.slots}" if at_first > weights else SMALLER
    own = {"process": _process_bytes(generation.device), "weights": weights}
    parts = own | rows
    likely = _sum(own) + _sum(engine.rows(largest=False))
    most = replicas * _sum(parts)
    least = replicas * (weights + at_first)
    return MemoryNeed(name, most, least, doc, generation.device, lower, parts, replicas * likely)


def _policy(config: Config, shape: Shape, lengths: RowLengths) -> MemoryNeed:
    """Estimates the trainer; with adapters only these have gradient and moments."""
    lora = config.model.lora
    adapters = None if lora is None else shape.adapters(lora)
    training = config.training
    return TrainedModel("training", config, shape, lengths, training.device, training.layout, adapters).need()


def _vllm(config: Config, shape: Shape, name: str, replicas: int) -> MemoryNeed:
    """Estimates workers with vLLM, which makes its whole cache at the start and has processes of its own."""
    generation = config.generation
    size = BYTES[config.model.dtype]
    tokens = cache_tokens(longest_row(config) + 1, generation.slots)
    cache = generation.layout_tp * generation.vllm.get("kv_cache_memory_bytes", 0)  # It is of each process.
    cache = cache or tokens * shape.cache_bytes_per_token * size // FLOAT
    weights = shape.parameters * size
    doc = f"vLLM with weights {size_text(weights)} and cache {size_text(cache)} a replica"
    lower = f"lower generation.slots, which is {generation.slots}" if cache > weights else SMALLER
    parts = {"process": (1 + generation.layout_tp) * GPU_PROCESS_BYTES, "weights": weights, "cache": cache}
    least = replicas * (weights + cache)
    return MemoryNeed(name, replicas * _sum(parts), least, doc, generation.device, lower, parts)


def _sum(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def _largest_phase(phases: Mapping[str, Parts]) -> int:
    return max(map(_sum, phases.values()))


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """Estimates a service that trains a model. adapters: their parameters, where nothing else is trained."""

    name: str
    config: Config
    shape: Shape
    lengths: RowLengths
    device: str
    layout: AnyLayout
    adapters: int | None = None

    def need(self) -> MemoryNeed:
        largest = largest_pass(self.config, self.lengths, self.layout.data).of_slice(self.layout.sp)
        largest = with_pictures(largest, self.config, self.shape, self.lengths, self.layout.data, largest=True)
        most = self._stages(largest, self._rows(largest=True))
        size = self._total(most)
        phases = max(most, key=_largest_phase)
        expected = self._total([self.likely_phases(stage) for stage in range(self.layout.pp)])
        least = self._total(self._stages(largest, self._engine.least), (*STATE, *TO_SAMPLE))
        return MemoryNeed(
            self.name,
            size,
            least,
            self._doc(phases),
            self.device,
            LESS_AT_ONCE,
            max(phases.values(), key=_sum),
            min(size, expected),
            phases if len(phases) > 1 else {},
        )

    def likely_phases(self, stage: int) -> dict[str, Parts]:
        """Returns what `phases` does, with prompts of the mean length."""
        return self.phases(self.likely_pass, stage, self._rows(largest=False))

    def _rows(self, *, largest: bool) -> Parts:
        """Returns what samples and prompts take while they are sampled; nothing where ranks do not sample."""
        return self._engine.rows(largest=largest) if self._samples else {}

    def _stages(self, size: ForwardPass, rows: Parts) -> list[dict[str, Parts]]:
        return [self.phases(size, stage, rows) for stage in range(self.layout.pp)]

    def _doc(self, phases: Mapping[str, Parts]) -> str:
        step = phases["step"]
        own = sum(step.get(key, 0) for key in STATE)
        what = "frozen weights, and adapters as they train," if self.adapters else "weights, gradient and moments"
        doc = f"{what} {size_text(own)}, a micro-batch {size_text(step['activations'])}"
        if (sampling := phases.get("sampling")) is None:
            return doc
        twice = f", {size_text(sampling['held twice'])} of it held twice" if "held twice" in sampling else ""
        return f"{doc}; while it samples {size_text(_sum(sampling))}{twice}"

    @property
    def _samples(self) -> bool:
        """Returns whether the ranks sample too."""
        return self.name == "training" and self.config.generation.colocate != "none"

    @property
    def _engine(self) -> EngineMemory:
        layout = self.config.generation.layout
        return EngineMemory(
            self.config, self.shape, self.lengths, self.layout.size // layout.size, layout.tp, layout.pp
        )

    @property
    def likely_pass(self) -> ForwardPass:
        """Returns the micro-batch of a rank with prompts of the mean length; slices of rows are not packed."""
        shape = self.shape if self.layout.sp == 1 else replace(self.shape, packs=False)
        size = likely_pass(self.config, shape, self.lengths, self.layout.data, self.device).of_slice(self.layout.sp)
        return with_pictures(size, self.config, shape, self.lengths, self.layout.data)

    def _total(self, stages: list[dict[str, Parts]], names: Collection[str] = ()) -> int:
        """Returns the bytes of all ranks, or of these parts of them, each in its largest phase."""
        chosen = (
            max(sum(size for name, size in parts.items() if name in (names or parts)) for parts in phases.values())
            for phases in stages
        )
        return self.layout.size // self.layout.pp * sum(chosen)

    def phases(self, size: ForwardPass, stage: int, rows: Parts) -> dict[str, Parts]:
        """Returns the bytes of a rank of a pipeline stage in each phase, by what takes them; in a step alone where it
        does not sample. rows: what samples and prompts take while they are sampled."""
        step = self.parts(size, stage)
        if not self._samples:
            return {"step": step}
        shape = self.shape.stage(stage, self.layout.pp)
        sampled = self.config.generation.layout.pp
        joined = self.shape.stage(stage * sampled // self.layout.pp, sampled, self.layout.pp)
        engine = replace(self._engine, stage=joined)
        return SamplingRank(engine, self.layout, shape, stage, self._state(shape)).phases(step, rows)

    def parts(self, size: ForwardPass, stage: int) -> dict[str, int]:
        """Returns the bytes of a rank of a pipeline stage in a step, by what takes them."""
        config = self.config
        layout = self.layout
        lora = self.adapters is not None
        shape = self.shape.stage(stage, layout.pp)
        buffers = 0
        state = self._state(shape)
        if layout.pp == 1:
            batch = self._pass_beside(state["gradients"], size)
        else:
            passes = passes_of_update(config, self.lengths, size, self.layout.data)
            batch, buffers = stage_bytes(config, shape, size, stage, layout.pp, passes, lora=lora, tp=layout.tp)
        if self.name == "training" and config.training.zero_stage:
            batch = max(batch, FLOAT * zero_memory(config, shape).stepping())
        else:
            batch = max(batch, summed_bytes(shape, layout, state["gradients"]))
        return {
            "process": _process_bytes(self.device),
            **state,
            "activations": batch,
            **({"buffers of stages": buffers} if buffers else {}),
            **({"pixels": size.pixels} if size.pixels else {}),
            "kept by malloc": kept_bytes(config, shape, size, batch, self.device),
        }

    def _pass_beside(self, gradients: int, size: ForwardPass) -> int:
        """Returns the most bytes of a pass beside all gradients. The first pass of an update has all activations while
        there is the gradient of the head alone, and those of the first layer before there are gradients of it; the next
        one finds all gradients."""
        layout = self.layout
        shape = self.shape
        is_policy = self.name == "training"
        lora = self.adapters is not None
        stage = self.config.training.zero_stage if is_policy else 0
        gathered = 0 if layout.shard == 1 else gathered_layers(shape, layout.tp, frozen=lora)
        taken = partial(pass_bytes, self.config, lora=lora, tp=layout.tp, ep=layout.ep, gathered=gathered)
        batch = taken(shape, size, head=is_policy)
        if size.next_part == 1 or stage == 3:
            return batch
        growing = gradients
        head = FLOAT * shape.vocabulary * shape.hidden if is_policy else 0
        if stage:
            growing, head = (FLOAT * each for each in zero_memory(self.config, shape).growing())
        at_end = taken(replace(shape, layers=1), size, head=False) - growing // shape.layers
        later = taken(shape, size.next, head=is_policy) if size.next_part else 0
        return max(batch - max(0, growing - head), at_end, later, 0)

    def _state(self, shape: Shape) -> dict[str, int]:
        """Returns the bytes that a rank keeps from step to step, and those of weights that it gathers."""
        training = self.config.training
        layout = self.layout
        adapters = self.adapters
        own = 0 if adapters is None else adapters * shape.layers // self.shape.layers
        held = shape.outside + shape.layers * shape.layer_parameters(layout.tp, layout.ep)
        learnt = held if adapters is None else own
        moments = int(kept_numbers(training.optimizer, training.optimizer_options) * learnt)
        gathered = 0 if layout.shard == 1 else gathered_bytes(shape, layout.tp, frozen=adapters is not None)
        numbers = {"weights": held + own, "gradients": learnt, "optimizer": moments}
        if self.name == "training" and training.zero_stage:
            zero = zero_memory(self.config, shape)
            numbers = zero.on_device()
            numbers["optimizer"] += zero.on_host() if self.device == "cpu" else 0
        found = {key: -(-FLOAT * number // layout.shard) for key, number in numbers.items()}
        return found | ({"gathered": gathered} if gathered else {})


def _critic(name: str, config: Config, critic: CriticConfig, policy: Shape, lengths: RowLengths) -> MemoryNeed:
    shape = shape_of(critic.model) if critic.model else None
    return TrainedModel(name, config, shape or policy, lengths, critic.device, critic.layout).need()


def _scorer(name: str, scorer: RewardConfig, policy: Shape) -> MemoryNeed:
    """Estimates a scoring service. policy: shape that a model counts as when its own is unknown."""
    doc = "without the memory of your functions, which run in processes of their own"
    if not scorer.model:
        return MemoryNeed(name, scorer.replicas * scorer.layout.size * PLAIN_BYTES, 0, doc)
    shape = shape_of(scorer.model) or policy
    return frozen_need(name, shape, scorer.layout, scorer.replicas, scorer.device, doc)


def critic_count(config: Config) -> int:
    return (config.algorithm.advantage == "gae") + (config.algorithm.constraint == "lagrangian")


# Estimates what a run takes of shared memory: versions of the weights, and rows.


TEXT_BYTES_PER_TOKEN = 4
"""Text of a sampled token, in bytes: usual tokenizers need 3 to 5 bytes of code, English or Chinese for one."""


@dataclass(frozen=True, slots=True)
class SharedMemoryNeed:
    """Bytes in /dev/shm. weights: two versions, taken at the start. rows: of all samples that may be in flight, each
    with the longest prompt and answer; memory is taken as they come. worst_rows: the same if each token of text were
    the longest one. likely_rows: the same with the mean prompt."""

    weights: int
    rows: int
    worst_rows: int
    likely_rows: int = 0


def shared_memory(
    config: Config, shape: Shape, longest_token: int = TEXT_BYTES_PER_TOKEN, lengths: RowLengths | None = None
) -> SharedMemoryNeed:
    """Returns what a run takes of shared memory. longest_token: bytes of text. lengths: of prompts, by default the most
    that the config allows."""
    lengths = lengths or RowLengths.allowed(config)
    is_shared = transport_of(config).facts.in_shm and config.publishes_weights
    weights = SLOTS * version_bytes(config, shape) if is_shared else 0
    if config.fleet.wire != "ipc":
        return SharedMemoryNeed(weights, 0, 0)
    rows, worst_rows = (_rows(config, shape, lengths.longest, text) for text in (TEXT_BYTES_PER_TOKEN, longest_token))
    likely = _rows(config, shape, lengths.mean, TEXT_BYTES_PER_TOKEN)
    most_shown, shown = (_rows_of_pictures(config, shape, lengths, largest=largest) for largest in (True, False))
    return SharedMemoryNeed(weights, rows + most_shown, max(rows, worst_rows) + most_shown, likely + shown)


def _rows_of_pictures(config: Config, shape: Shape, lengths: RowLengths, *, largest: bool) -> int:
    """Returns the bytes of the pictures of all groups in flight, which are stored beside their samples."""
    if shape.encoder is None or not (patches := prompt_patches(shape.encoder, lengths, largest=largest)):
        return 0
    row = bytes_of_row(picture_columns(patches // shape.encoder.merge**2, shape.encoder.patch, shape.encoder.merge))
    members = config.task.samples_per_prompt
    evaluated = max(config.generation.slots, config.evaluate.most_samples)
    total = bytes_of_rows(-(-GateConfig.of(config).kept // members), row, config.generation_replicas)
    return total + (bytes_of_rows(-(-evaluated // members), row) if config.evaluate.is_on else 0)


def _rows(config: Config, shape: Shape, prompt: int, text: int) -> int:
    """Returns the bytes of all rows in flight, with so many tokens of each prompt, and bytes of text for each sampled
    token."""
    gate = GateConfig.of(config)
    response = config.response_tokens
    experts = _recorded(config, shape, prompt + response)
    sample = bytes_of_row(sample_columns(prompt, response, text * response) | experts)
    total = bytes_of_rows(gate.kept, sample, config.generation_replicas)
    if config.environment.use:
        total += bytes_of_rows(gate.kept, _episode_bytes(config, prompt, text, experts), config.environment.replicas)
    if stores_token_rewards(config):
        total += bytes_of_rows(gate.kept, bytes_of_row(token_reward_columns(response)), config.reward.replicas)
    if config.reference_by_service:
        total += bytes_of_rows(gate.kept, bytes_of_row(reference_columns(response)), config.reference.replicas)
    total += critic_count(config) * bytes_of_rows(gate.kept, bytes_of_row(value_columns("values", "at", response)))
    if config.evaluate.is_on:
        total += bytes_of_rows(max(config.generation.slots, config.evaluate.most_samples), sample)
    return total


def _recorded(config: Config, shape: Shape, tokens: int) -> Columns:
    if not config.training.router_replay or shape.record is None:
        return {}
    return expert_columns(tokens, shape.record.dtype, shape.record.width)


def _episode_bytes(config: Config, prompt: int, text: int, experts: Columns) -> int:
    """Returns the bytes of the row of an episode, with so many bytes of text for each token of it."""
    section = config.environment
    answer = text * config.generation.max_new_tokens
    transcript = text * section.max_tokens
    return bytes_of_row(episode_columns(prompt, section.max_tokens, answer, section.max_turns, transcript) | experts)


def longest_token_of(model: str) -> int:
    """Returns the most bytes of text that a token of the model may have, as its tokenizer.json says, or the usual
    number where there is none."""
    path = Path(model).expanduser() / "tokenizer.json"
    try:
        vocabulary = json.loads(path.read_text())["model"]["vocab"]
        return 1 + max(len((token if isinstance(token, str) else token[0]).encode()) for token in vocabulary)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return TEXT_BYTES_PER_TOKEN


# Plans where workers run and how many bytes each takes, for `asyncrl plan` and checks of a run.


NO_WORKERS = (OFFLOADED, OFFERED, TAKEN, CHECKPOINTS)
"""Needs that belong to no single worker."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedWorker:
    """One worker, or what workers of one service hold together on a device. host: its name. is_here: whether that is
    the host of the controller. domain: what fails with it at one moment. device: what it computes on. service: whose
    pool it is in. need: of all hosts together. part, whole: its share of that."""

    name: str
    host: str
    is_here: bool
    domain: str
    device: str
    service: str
    need: MemoryNeed
    part: int
    whole: int

    @property
    def bytes(self) -> int:
        """Returns the estimate of the most that this worker takes."""
        return self.need.bytes * self.part // self.whole

    @property
    def likely(self) -> int:
        return self.need.expected * self.part // self.whole

    @property
    def least(self) -> int:
        return self.need.least * self.part // self.whole

    @property
    def floor(self) -> int:
        """Returns the bytes of its devices that it takes however little is sampled."""
        return self.least + self.need.process

    @property
    def devices(self) -> list[str]:
        """Returns its devices, which have equal shares of its bytes."""
        return self.device.split()


def planned_workers(config: Config, shape: Shape, lengths: RowLengths | None = None) -> Iterator[PlannedWorker]:
    """Yields the workers that need memory, in the order of `needs`, and what some hold beside that, by host."""
    here = HostId.here()
    placement = Placement.of(config)

    def planned(name: str, at: PlacedWorker, device: str, need: MemoryNeed, part: int, whole: int) -> PlannedWorker:
        host = at.host or here.name
        domain = host if at.joins else here.fault_domain
        return PlannedWorker(name, host, not at.joins, domain, device, at.service, need, part, whole)

    for need in needs(config, shape, lengths):
        for worker in () if need.held else placement.workers[need.name]:
            yield planned(worker.name, worker, " ".join(worker.devices), need, 1, len(placement.workers[need.name]))
        holders: dict[tuple[str, str, str], list[PlacedWorker]] = {}
        for worker in need.held:
            device = worker.devices[0] if need.device != "cpu" else "cpu"
            holders.setdefault((worker.host, worker.service, device), []).append(worker)
        for (_, _, device), workers in holders.items():
            part = sum(need.held[each] for each in workers)
            yield planned(need.name, workers[0], device, need, part, sum(need.held.values()))


def budget_problems(config: Config, shape: Shape) -> Iterator[Problem]:
    """Yields a problem for each device of a pool whose services need more than its budget, however little they
    sample, and a warning where they probably do."""
    if not any(pools_of(config)[pool].memory_bytes for pool in pool_names(config).values()):
        return
    for (pool, host, device), workers in _loads(config, shape).items():
        if not (budget := pools_of(config)[pool].memory_bytes if pool else 0):
            continue
        where = f"{device} of {host}"
        users = _keys(workers)
        for is_warning, size in ((False, attrgetter("floor")), (True, attrgetter("likely"))):
            sizes = {worker: size(worker) // len(worker.devices) for worker in workers}
            if sum(sizes.values()) > budget:
                text = _over_budget(pool, where, budget, sizes, is_warning)
                yield Problem(f"pools.{pool}.memory_gb", "", text, users, is_warning)
                break


def unchecked_memory(config: Config, shape: Shape) -> Iterator[Problem]:
    """Yields a note for the devices of each pool without a budget, for GPUs without a pool, and for the memory of other
    hosts, which nobody here knows."""
    found = dict[tuple[str, str], dict[str, list[PlannedWorker]]]()
    for (pool, host, device), workers in _loads(config, shape).items():
        is_known = pools_of(config)[pool].memory_bytes if pool else all(each.is_here for each in workers)
        if is_known and (pool or device == "cpu"):
            continue
        found.setdefault((pool, "cpu" if device == "cpu" else ""), {})[f"{device} of {host}"] = workers
    for (pool, cpu), places in found.items():
        named = sorted(places)
        users = _keys(chain(*places.values()))
        need = max(sum(each.likely // len(each.devices) for each in workers) for workers in places.values())
        where = f"{named[0]} to {named[-1]}" if len(named) > 2 else " and ".join(named)
        text = f"the memory of {where} was not checked, where services probably need up to {size_text(need)} each"
        if pool:
            write = f"write the GB (10^9 bytes) of one device as pools.{pool}.memory_gb"
        elif cpu:
            write = "no key says how much such a host has: see that it is more"
        else:
            write = "name a pool with memory_gb, the GB (10^9 bytes) of one device"
        yield Problem(f"pools.{pool}.memory_gb" if pool else "", "", f"{text}: {write}", users, is_warning=True)


def _keys(workers: Iterable[PlannedWorker]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(pool_key(worker.service) for worker in workers))


def _loads(config: Config, shape: Shape) -> dict[tuple[str, str, str], list[PlannedWorker]]:
    """Returns the workers on each device, by pool, host and device. pool: "" on a device that is of no pool of
    theirs."""
    pools = pools_of(config)
    names = pool_names(config)
    loads: dict[tuple[str, str, str], list[PlannedWorker]] = {}
    for worker in planned_workers(config, shape, measured_lengths(config, config.model.name)):
        pool = names.get(worker.service, "")
        for device in worker.devices:
            is_of_pool = pool and device in pools[pool].devices
            loads.setdefault((pool if is_of_pool else "", worker.host, device), []).append(worker)
    return loads


def _over_budget(pool: str, where: str, budget: int, sizes: Mapping[PlannedWorker, int], is_likely: bool) -> str:
    """Returns what is wrong about a device, and what to do. sizes: of its workers."""
    largest = max(sizes, key=sizes.__getitem__)
    total = size_text(sum(sizes.values()))
    need = f"probably needs {total}" if is_likely else f"needs {total} at least"
    return (
        f"{where} {need} for {', '.join(worker.name for worker in sizes)}, and pool {pool!r} allows "
        f"{size_text(budget)}; {largest.name} takes {size_text(sizes[largest])} of that: {largest.need.lower}, run it "
        "in another pool, or raise memory_gb"
    )


def memory_problems(config: Config, shape: Shape, available: int) -> Iterator[Problem]:
    """Yields a problem when the services on the CPU of this host need more memory than it has, however little they
    sample, and for budgets that are too small. available: memory of this host."""
    found = [each for each in planned_workers(config, shape) if each.device == "cpu" and each.is_here]
    total = sum(worker.least for worker in found)
    if total > available:
        sizes = Counter[str]()
        for each in found:
            sizes[each.need.name] += each.least
        largest = max(found, key=lambda worker: sizes[worker.need.name]).need
        text = (
            f"{size_text(available)} of memory are available, and this run takes {size_text(total)} at least, "
            f"{size_text(sizes[largest.name])} of that for {largest.name}: {largest.lower}; `{program()} plan` with "
            "the same arguments shows what needs how much"
        )
        yield Problem("", "", text)
    yield from budget_problems(config, shape)
