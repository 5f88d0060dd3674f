"""About how many bytes each service of an experiment needs, from its config and the shape of its model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from asyncrl.config import Config, Critic, Reward
from asyncrl.context import longest_row
from asyncrl.deploy.machine import available_memory
from asyncrl.errors import ConfigError
from asyncrl.groups import GateConfig
from asyncrl.installing import program

FLOAT = 4
ADAM_BYTES = 4 * FLOAT
"""Of one parameter while training: float32 weight, gradient and two moments."""
ACTIVATION_BYTES_PER_UNIT = 68
"""Of one token, layer and hidden unit without checkpointing, in float32: 34 bytes in 16 bit
(Korthikanti et al. 2022, equation 2, without the attention scores)."""
ROW_BYTES_PER_TOKEN = 16
"""Token id, log-prob, version and reference log-prob."""
VALUE_BYTES_PER_TOKEN = 4
PROCESS_BYTES = 500 * 2**20
"""Python with torch and transformers loaded."""
CHUNK, FIRST_CHUNKS = 32, 2
"""Positions in a chunk of the cache, and chunks that each slot has from the start (engines/generation/cache.py)."""
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a decoder-only transformer decides its size."""

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
        """From the content of a model folder's config.json. Raises KeyError when it is of another kind."""
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
        """Keys and values of one token in float32."""
        return 2 * self.layers * self.kv_heads * self.head_dim * FLOAT


PACKAGED = {
    "pypi:smollm2": Shape(
        vocabulary=49152, hidden=576, layers=30, intermediate=1536, heads=9, kv_heads=3, head_dim=64, tied=True
    )
}
SMALL = Shape(vocabulary=101, hidden=96, layers=3, intermediate=256, heads=4, kv_heads=4, head_dim=24, tied=True)
"""About what `warmed:` makes; next to a Python process it is nothing."""


def shape_of(model: str) -> Shape | None:
    """The shape of a model that lies on this machine or comes with a package; None when only a download would tell."""
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
class Need:
    """Of all workers of the service together.

    bytes: at most, about. least: however little is sampled. lower: the key to lower when that is too much.
    """

    name: str
    bytes: int
    least: int
    doc: str
    device: str = "cpu"
    lower: str = SMALLER


def needs(config: Config, shape: Shape) -> list[Need]:
    """Memory of each service, on its device."""
    found = [_generation(config, shape), _training(config, shape)]
    found.append(_judge("reward", config.reward, shape))
    if config.algorithm.kl > 0:
        replicas, weights = config.reference.replicas, shape.parameters * FLOAT
        size = replicas * (PROCESS_BYTES + weights)
        found.append(Need("reference", size, replicas * weights, "frozen weights", config.reference.device))
    if config.algorithm.advantage == "gae":
        found.append(_critic("critic", config, config.critic, shape))
    if config.algorithm.constraint == "lagrangian":
        found += [_judge("cost", config.cost, shape), _critic("cost_critic", config, config.cost_critic, shape)]
    if config.evaluate.prompts:
        found.append(_generation(config, shape, "evaluation", 1))
    return found


def refuse_what_does_not_fit(config: Config, model: str) -> None:
    """Raises ConfigError when the services take more memory than there is, however little they sample."""
    if (shape := shape_of(model)) is None:
        return
    found = [need for need in needs(config, shape) if need.device == "cpu"]
    total, there = sum(need.least for need in found), available_memory()
    if total > there:
        largest = max(found, key=lambda need: need.least)
        raise ConfigError(
            f"{size_text(there)} of memory are available, and this run takes {size_text(total)} at least, "
            f"{size_text(largest.least)} of that for {largest.name}: {largest.lower}; `{program()} doctor` with the "
            "same arguments shows what needs how much"
        )


def _generation(config: Config, shape: Shape, name: str = "generation", replicas: int = 0) -> Need:
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
    return Need(name, size, least, doc, generation.device, lower)


def _training(config: Config, shape: Shape) -> Need:
    training = config.training
    activations = _activations(config, shape)
    logits = 2 * min(training.logits_chunk, _micro_batch(config)) * shape.vocabulary * FLOAT
    state = shape.parameters * ADAM_BYTES
    size = PROCESS_BYTES + state + activations + logits
    doc = f"weights, gradient and moments {size_text(state)}, a micro-batch {size_text(activations + logits)}"
    return Need("training", training.layout_dp * size, training.layout_dp * state, doc, training.device)


def _judge(name: str, judge: Reward, policy: Shape) -> Need:
    """policy: what a model is counted as that cannot be looked at."""
    doc = "and what your functions need, in their own processes"
    weights = (shape_of(judge.model) or policy).parameters * FLOAT if judge.model else 0
    doc = f"frozen weights {size_text(weights)}, {doc}" if weights else doc
    return Need(name, PROCESS_BYTES + weights, weights, doc, judge.device if weights else "cpu")


def _critic(name: str, config: Config, critic: Critic, policy: Shape) -> Need:
    shape = shape_of(critic.model) or policy if critic.model else policy
    state, activations = shape.parameters * ADAM_BYTES, _activations(config, shape)
    doc = f"weights, gradient and moments {size_text(state)}, a micro-batch {size_text(activations)}"
    return Need(name, PROCESS_BYTES + state + activations, state, doc, critic.device)


def _micro_batch(config: Config) -> int:
    """Tokens of the largest one."""
    samples = config.task.prompts_per_step * config.task.samples_per_prompt
    return min(config.training.micro_batch_tokens, samples * longest_row(config))


def _activations(config: Config, shape: Shape) -> int:
    kept_layers = 1 if config.training.gradient_checkpointing else shape.layers
    bytes_per_unit = ACTIVATION_BYTES_PER_UNIT * kept_layers + FLOAT * shape.layers
    return _micro_batch(config) * shape.hidden * bytes_per_unit


def shared_memory(config: Config, shape: Shape) -> int:
    """Bytes in /dev/shm: two versions of the weights, and the rows of all groups that may be in flight."""
    gate = GateConfig.of(config)
    critics = (config.algorithm.advantage == "gae") + (config.algorithm.constraint == "lagrangian")
    a_token = ROW_BYTES_PER_TOKEN + critics * VALUE_BYTES_PER_TOKEN
    rows = gate.cap * gate.members * longest_row(config) * a_token
    return 2 * shape.parameters * BYTES[config.model.dtype] + (rows if config.fleet.wire == "ipc" else 0)


def size_text(size: float) -> str:
    """12345678 -> "11.8 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1024 or unit == "GB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
