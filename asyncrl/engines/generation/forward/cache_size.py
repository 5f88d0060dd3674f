"""The number of blocks that the KV cache of an experiment has."""

from typing import Any

from asyncrl.config.schema import Config
from asyncrl.engines.generation.scheduling.block_tables import KV_BLOCK, blocks_for
from asyncrl.engines.models.model_folder import longest_row
from asyncrl.errors import ConfigError

GB = 10**9
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def cache_blocks(config: Config, shape: Any, slots: int) -> int:
    """Returns the blocks within `generation.cache_gb`, at most those of the longest row in every slot. shape: the
    config of transformers. Raises ConfigError when the cache would not hold one row, or in deterministic mode not all.
    """
    whole, bytes_of_block = blocks_for(longest_row(config)), block_bytes(shape, ITEM_BYTES[config.model.dtype])
    generation = config.generation
    if not generation.cache_gb:
        return slots * whole
    found = min(slots * whole, int(generation.cache_gb * GB / bytes_of_block))
    least = slots * whole if generation.deterministic else whole
    if found < least:
        rows = f"{slots} rows, which generation.deterministic keeps," if generation.deterministic else "one row"
        raise ConfigError(
            f"generation.cache_gb is {generation.cache_gb:g}, and the keys and values of {rows} of the longest length "
            f"need {least * bytes_of_block / GB:.3g} GB. Raise generation.cache_gb or lower generation.max_new_tokens"
        )
    return found


def block_bytes(shape: Any, itemsize: int) -> int:
    """Returns the bytes of one block in all layers of a model. shape: the config of transformers."""
    heads = shape.num_attention_heads
    kv_heads = getattr(shape, "num_key_value_heads", None) or heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    return int(2 * shape.num_hidden_layers * kv_heads * size * KV_BLOCK * itemsize)
