"""The number of blocks that the KV cache of an experiment has."""

from typing import Any

from asyncrl.config.schema import Config
from asyncrl.engines.generation.scheduling.block_pool import KV_BLOCK, blocks_for
from asyncrl.engines.models.model_folder import longest_row
from asyncrl.errors import ConfigError

GB = 10**9
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
FIXED_ROWS = 16
"""Fewest slots of deterministic mode: products over fewer rows than 4 (an AMD EPYC) or 16 (an Intel Xeon, of vectors of
576 numbers and more) round differently from larger ones."""


def engine_slots(config: Config) -> int:
    """Returns the rows of the batch of the torch engine."""
    generation = config.generation
    return max(generation.slots, FIXED_ROWS) if generation.deterministic else generation.slots


def cache_blocks(config: Config, shape: Any, slots: int, ranks: int = 1, layers: int | None = None) -> int:
    """Returns what `blocks_within` does. shape: the config of transformers. ranks: that share out its heads. layers: of
    the stage with most of them; None where ranks have all."""
    return blocks_within(config, block_bytes(shape, ITEM_BYTES[config.model.dtype], ranks, layers), slots)


def blocks_within(config: Config, bytes_of_block: int, slots: int) -> int:
    """Returns the blocks within `generation.cache_gb`, at most those of the longest row in every slot. Raises
    ConfigError when the cache would not hold one row, or in deterministic mode not all."""
    generation = config.generation
    whole = blocks_for(longest_row(config))
    if not generation.cache_gb:
        return slots * whole
    found = min(slots * whole, int(generation.cache_gb * GB / bytes_of_block))
    least = slots * whole if generation.deterministic else whole
    if found < least:
        rows = f"{slots} rows, which generation.deterministic keeps," if generation.deterministic else "one row"
        raise ConfigError(
            f"generation.cache_gb: {generation.cache_gb:g} GB do not hold the keys and values of {rows} of the longest "
            f"length, which take {least * bytes_of_block / GB:.3g} GB; raise generation.cache_gb or lower "
            "generation.max_new_tokens"
        )
    return found


def block_bytes(shape: Any, itemsize: int, ranks: int = 1, layers: int | None = None) -> int:
    """Returns the bytes of one block in so many layers of a model, or in all, at each of the ranks that share out its
    heads. shape: the config of transformers."""
    heads = shape.num_attention_heads
    kv_heads = getattr(shape, "num_key_value_heads", None) or heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    return int(2 * (layers or shape.num_hidden_layers) * (kv_heads // ranks) * size * KV_BLOCK * itemsize)
