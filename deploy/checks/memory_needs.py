"""Estimates how many bytes each service of an experiment needs, from its config and the shape of its model."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from asyncrl.config.gate_config import GateConfig
from asyncrl.config.install_hints import program
from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config, CriticConfig, RewardConfig
from asyncrl.deploy.checks.machine import available_memory
from asyncrl.engines.models.folder_checks import longest_row

FLOAT = 4
ADAM_BYTES = 4 * FLOAT
"""Bytes of one parameter while training: float32 weight, gradient and two moments."""
ACTIVATION_BYTES_PER_UNIT = 68
"""Bytes of one token, layer and hidden unit without checkpointing, in float32: 34 bytes in 16 bit
(Korthikanti et al. 2022, equation 2, without the attention scores)."""
ROW_BYTES_PER_TOKEN = 16
"""Token id, log-prob, version and reference log-prob."""
VALUE_BYTES_PER_TOKEN = 4
PROCESS_BYTES = 500 * 2**20
"""Python with torch and transformers loaded."""
CHUNK, FIRST_CHUNKS = 32, 2
"""Positions in a block of the KV cache, and blocks of each slot from the start (generation/forward/kv_cache.py)."""
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that decide the size of a decoder-only transformer."""

    vocabulary: int
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        """Reads the shape from a model folder's config.json; raises KeyError for another kind of model."""
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return cls(
            vocabulary=int(config["vocab_size"]),
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in float32."""
        return 2 * self.layers * self.kv_heads * self.head_dim * FLOAT


PACKAGED = {
    "pypi:smollm2": Shape(
        vocabulary=49152, hidden=576, layers=30, intermediate=1536, heads=9, kv_heads=3, head_dim=64, tied=True
    )
}
SMALL = Shape(vocabulary=101, hidden=96, layers=3, intermediate=256, heads=4, kv_heads=4, head_dim=24, tied=True)
"""About the shape of models that `warmed:` makes; a Python process needs much more memory."""


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


SMALLER = "take a smaller model (model.name)"


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory of all workers of a service together.

    bytes: estimate of the most. least: bytes however little is sampled. lower: what to lower when that is too much.
    """

    name: str
    bytes: int
    least: int
    doc: str
    device: str = "cpu"
    lower: str = SMALLER


def needs(config: Config, shape: Shape) -> list[MemoryNeed]:
    """Returns the memory that each service needs on its device."""
    found = [_generation(config, shape), _training(config, shape)]
    found.append(_scorer("reward", config.reward, shape))
    if config.algorithm.kl > 0:
        replicas, weights = config.reference.replicas, shape.parameters * FLOAT
        size = replicas * (PROCESS_BYTES + weights)
        found.append(MemoryNeed("reference", size, replicas * weights, "frozen weights", config.reference.device))
    if config.algorithm.advantage == "gae":
        found.append(_critic("critic", config, config.critic, shape))
    if config.algorithm.constraint == "lagrangian":
        found += [_scorer("cost", config.cost, shape), _critic("cost_critic", config, config.cost_critic, shape)]
    if config.evaluate.prompts:
        found.append(_generation(config, shape, "evaluation", 1))
    return found


def memory_problems(config: Config, model: str) -> Iterator[Problem]:
    """Yields a problem when the services need more memory than is available, however little they sample.

    model: a name that `shape_of` takes.
    """
    if (shape := shape_of(model)) is None:
        return
    found = [need for need in needs(config, shape) if need.device == "cpu"]
    total, there = sum(need.least for need in found), available_memory()
    if total > there:
        largest = max(found, key=lambda need: need.least)
        text = (
            f"{size_text(there)} of memory are available, and this run takes {size_text(total)} at least, "
            f"{size_text(largest.least)} of that for {largest.name}: {largest.lower}; `{program()} doctor` with the "
            "same arguments shows what needs how much"
        )
        yield Problem("", "", text)


def _generation(config: Config, shape: Shape, name: str = "generation", replicas: int = 0) -> MemoryNeed:
    generation, gate = config.generation, GateConfig.of(config)
    replicas = replicas or generation.replicas
    rounded = config.model.dtype == "bfloat16"
    head = shape.vocabulary * shape.hidden * FLOAT if config.model.float32_head and rounded else 0
    weights = shape.parameters * BYTES[config.model.dtype] + head
    chunk = CHUNK * shape.cache_bytes_per_token * BYTES[config.model.dtype] // FLOAT
    longest = -(-longest_row(config) // CHUNK)
    at_first = generation.slots * chunk * (longest if generation.deterministic else min(FIRST_CHUNKS, longest))
    cache = max(at_first, min(generation.slots, gate.cap * gate.members) * longest * chunk)
    doc = f"weights {size_text(weights)} and cache {size_text(at_first)} to {size_text(cache)} a replica"
    lower = f"lower generation.slots, which is {generation.slots}" if at_first > weights else SMALLER
    size, least = (replicas * (taken + weights) for taken in (PROCESS_BYTES + cache, at_first))
    return MemoryNeed(name, size, least, doc, generation.device, lower)


def _training(config: Config, shape: Shape) -> MemoryNeed:
    training = config.training
    activations = _activations(config, shape)
    logits = 2 * min(training.logits_chunk, _micro_batch(config)) * shape.vocabulary * FLOAT
    state = shape.parameters * ADAM_BYTES
    size = PROCESS_BYTES + state + activations + logits
    doc = f"weights, gradient and moments {size_text(state)}, a micro-batch {size_text(activations + logits)}"
    return MemoryNeed("training", training.layout_dp * size, training.layout_dp * state, doc, training.device)


def _scorer(name: str, scorer: RewardConfig, policy: Shape) -> MemoryNeed:
    """Estimates a scoring service. policy: shape that a model counts as when its own is unknown."""
    doc = "and the memory of your functions in their own processes"
    weights = (shape_of(scorer.model) or policy).parameters * FLOAT if scorer.model else 0
    doc = f"frozen weights {size_text(weights)}, {doc}" if weights else doc
    return MemoryNeed(name, PROCESS_BYTES + weights, weights, doc, scorer.device if weights else "cpu")


def _critic(name: str, config: Config, critic: CriticConfig, policy: Shape) -> MemoryNeed:
    shape = shape_of(critic.model) or policy if critic.model else policy
    state, activations = shape.parameters * ADAM_BYTES, _activations(config, shape)
    doc = f"weights, gradient and moments {size_text(state)}, a micro-batch {size_text(activations)}"
    return MemoryNeed(name, PROCESS_BYTES + state + activations, state, doc, critic.device)


def _micro_batch(config: Config) -> int:
    """Returns the tokens of the largest micro-batch."""
    samples = config.task.prompts_per_step * config.task.samples_per_prompt
    return min(config.training.micro_batch_tokens, samples * longest_row(config))


def _activations(config: Config, shape: Shape) -> int:
    stored_layers = 1 if config.training.gradient_checkpointing else shape.layers
    bytes_per_unit = ACTIVATION_BYTES_PER_UNIT * stored_layers + FLOAT * shape.layers
    return _micro_batch(config) * shape.hidden * bytes_per_unit


def shared_memory(config: Config, shape: Shape) -> int:
    """Returns the bytes in /dev/shm: two versions of the weights, and the rows of all groups that may be in flight."""
    gate = GateConfig.of(config)
    critics = (config.algorithm.advantage == "gae") + (config.algorithm.constraint == "lagrangian")
    a_token = ROW_BYTES_PER_TOKEN + critics * VALUE_BYTES_PER_TOKEN
    rows = gate.cap * gate.members * longest_row(config) * a_token
    return 2 * shape.parameters * BYTES[config.model.dtype] + (rows if config.fleet.wire == "ipc" else 0)


def size_text(size: float) -> str:
    """Formats bytes: 12345678 -> "11.8 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1024 or unit == "GB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
