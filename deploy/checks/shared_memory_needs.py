"""Estimates what a run takes of shared memory: versions of the weights, and rows."""

import json
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import Config
from asyncrl.deploy.checks.memory_needs import critic_count, version_bytes
from asyncrl.deploy.checks.row_lengths import RowLengths
from asyncrl.deploy.checks.training_memory import prompt_patches
from asyncrl.engines.model_shape import Shape
from asyncrl.engines.pictures.prompt_pictures import picture_columns
from asyncrl.fleet.weight_transport import transport_of
from asyncrl.lanes.data.row_store import bytes_of_row, bytes_of_rows
from asyncrl.lanes.weights.leases import SLOTS
from asyncrl.protocols.batch import (
    Columns,
    episode_columns,
    expert_columns,
    reference_columns,
    sample_columns,
    token_reward_columns,
    value_columns,
)
from asyncrl.rewards.execution.token_rewards import stores_token_rewards

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
    is_shared = transport_of(config).name == "shm" and config.publishes_weights
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
