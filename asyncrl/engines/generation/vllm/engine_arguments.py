"""The arguments that vLLM is started with: what asyncrl decides, and what `[generation.vllm]` adds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.engines.canary_logprobs import PROBE_TOKENS
from asyncrl.engines.generation.vllm.option_problems import BACKEND, cache_tokens, head_width
from asyncrl.engines.models.model_folder import context_of, longest_row

EXTENSION = "asyncrl.engines.generation.vllm.worker_extension.WorkerExtension"


def engine_arguments(config: Config, folder: Path, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of AsyncEngineArgs. shape: the contents of the model's config.json, for the size of the
    cache on CPUs: all slots with the longest row, so that no sample is ever preempted."""
    generation = config.generation
    context = context_of(shape)
    # One token is sampled after the canary, which may be as long as the longest row.
    rows = max(longest_row(config, context), PROBE_TOKENS) + 1
    rows = rows if context is None else min(rows, context)
    arguments: dict[str, Any] = {"enforce_eager": True, "seed": 0, "async_scheduling": False}
    if generation.device == "cpu":
        size = cache_bytes(shape, config.model.dtype, rows, generation.slots, generation.layout_tp)
        arguments["kv_cache_memory_bytes"] = size
    transfer = {} if generation.device == "cpu" else {"weight_transfer_config": {"backend": BACKEND}}
    decided = {
        "model": str(folder),
        "dtype": config.model.dtype,
        "max_num_seqs": generation.slots,
        "tensor_parallel_size": generation.layout_tp,
        "max_model_len": rows,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "worker_extension_cls": EXTENSION,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    return {**arguments, **generation.vllm, **decided, **transfer}


def cache_bytes(shape: Mapping[str, Any], dtype: str, tokens: int, rows: int, processes: int = 1) -> int:
    """Returns the bytes of keys and values of this many rows of this many tokens, in blocks, with some to spare, in
    each of the processes that share the heads."""
    shape = shape.get("text_config") or shape
    heads = -(-(shape.get("num_key_value_heads") or shape["num_attention_heads"]) // processes)
    item = {"float32": 4, "bfloat16": 2}[dtype]
    return int(2 * shape["num_hidden_layers"] * heads * head_width(shape) * item * cache_tokens(tokens, rows))
