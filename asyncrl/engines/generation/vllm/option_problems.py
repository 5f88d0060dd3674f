"""What `[generation.vllm]` may say, what vLLM cannot do, and the environment that its processes have. The controller
reads this, so it imports neither vLLM nor torch."""

import ast
import json
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config

KEY = "generation.vllm"
DECIDED = {
    "model": "model.name",
    "tokenizer": "model.name",
    "dtype": "model.dtype",
    "max_num_seqs": "generation.slots",
    "tensor_parallel_size": "generation.layout_tp",
    "max_model_len": "task.max_prompt_tokens and generation.max_new_tokens",
    "skip_tokenizer_init": "",
    "logprobs_mode": "",
    "max_logprobs": "",
    "worker_extension_cls": "",
    "generation_config": "",
    "disable_log_stats": "",
    "weight_transfer_config": "",
}
"""Arguments that asyncrl decides, with the key that says so; "": what samples mean depends on the argument."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # The engine and its worker are then one process, which starts sooner.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # Workers of a fleet share cores; binding would put all on the same.
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""Environment variables that vLLM reads, where the user has set none of that name."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of heads that vLLM 0.32 computes attention of on CPUs."""

BLOCK = 128  # tokens in a block of vLLM's cache on CPUs
SPARE_ROWS = 2  # The canary has a row of its own, and prompts of new samples are held beside those that end.
BACKEND = "asyncrl"
"""Name of the transfer of weights that asyncrl registers with vLLM for GPUs."""
OWNER = "OWNER_OF_VLLM"
"""Environment variable with the process id of the worker that starts vLLM. Those that begin with ASYNCRL_ are keys."""


def set_environment(environment: MutableMapping[str, str], config: Config, devices: Sequence[str] = ()) -> None:
    """Sets the environment variables that vLLM and its processes read, before vLLM is imported. devices: GPUs that this
    worker alone has; none: `generation.device`."""
    for name, value in ENVIRONMENT.items():
        environment.setdefault(name, value)
    environment[OWNER] = str(os.getpid())
    numbers = [number for _, _, number in (each.partition(":") for each in devices or [config.generation.device])]
    if all(numbers):  # "cpu" and "cuda" have no number.
        visible = list(filter(None, environment.get("CUDA_VISIBLE_DEVICES", "").split(",")))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[int(each)] if visible else each for each in numbers)


def vllm_problems(config: Config) -> Iterator[Problem]:
    """Yields what keeps vLLM from running this experiment, and a warning where its section is not read."""
    generation = config.generation
    if generation.engine != "vllm":
        if generation.vllm:
            text = 'nothing reads it with engine = "torch": remove it, or write engine = "vllm"'
            yield Problem(KEY, "", text, ("generation.engine",), is_warning=True)
        if generation.layout_tp > 1:
            text = 'the torch engine has one process a replica: write generation.replicas, or engine = "vllm"'
            yield Problem("generation.layout_tp", "", text, ("generation.engine",))
        return
    for key, is_set, text in (
        ("generation.deterministic", generation.deterministic, "vLLM's batches change the last bits of a sample"),
        ("generation.cache_gb", generation.cache_gb, f"vLLM's own argument is kv_cache_memory_bytes in [{KEY}]"),
        ("generation.prefill_tokens", generation.prefill_tokens, f"vLLM's is max_num_batched_tokens in [{KEY}]"),
        ("model.float32_head", config.model.float32_head, "vLLM computes the output layer in model.dtype"),
        ("fleet.wire", config.fleet.wire == "inproc", "vLLM has processes of its own, which read shared memory"),
    ):
        if is_set:
            yield Problem(key, "", f'{text}: remove it, or write generation.engine = "torch"', ("generation.engine",))
    yield from _option_problems(generation.vllm)
    folder = Path(config.model.name).expanduser()
    shape = json.loads((folder / "config.json").read_bytes()) if (folder / "config.json").is_file() else None
    if shape and generation.device == "cpu" and (found := unsupported_heads(shape)):
        yield Problem("model.name", "", found, ("generation.engine",))
    if shape and (heads := attention_heads(shape)) % generation.layout_tp:
        text = f"{generation.layout_tp} processes cannot share {heads} attention heads evenly: write a divisor of it"
        yield Problem("generation.layout_tp", "", text, ("model.name",))


def _option_problems(options: Iterable[str]) -> Iterator[Problem]:
    """Yields a problem for each argument that vLLM does not have or that asyncrl decides. Names are those of the
    installed vLLM; nothing is said about them where there is none."""
    known = argument_names()
    for name in options:
        if name in DECIDED:
            instead = f"write {DECIDED[name]}" if DECIDED[name] else "what a sample means depends on it"
            yield Problem(f"{KEY}.{name}", "", f"asyncrl decides this argument of vLLM: {instead}; remove it here")
        elif known and name not in known:
            close = get_close_matches(name, known, 1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            text = f"vLLM's AsyncEngineArgs have no {name!r}: {meant}`vllm serve --help` lists them with dashes"
            yield Problem(f"{KEY}.{name}", "", text)


def unsupported_heads(shape: Mapping[str, Any]) -> str | None:
    """Says why vLLM has no attention for this model on CPUs, where it would end at the first sample; None if it has.
    shape: the contents of config.json."""
    shape = shape.get("text_config") or shape
    width = head_width(shape)
    if width in CPU_HEADS:
        return None
    return (
        f"its attention heads have {width} numbers, and vLLM's attention on CPUs takes {', '.join(map(str, CPU_HEADS))}"
        ': write generation.engine = "torch", or take another model'
    )


def cache_tokens(tokens: int, rows: int) -> int:
    """Returns the tokens that the cache has on CPUs for this many rows of this many tokens: whole blocks, and some to
    spare."""
    return BLOCK * ((rows + SPARE_ROWS) * -(-tokens // BLOCK) + 1)


def attention_heads(shape: Mapping[str, Any]) -> int:
    return int((shape.get("text_config") or shape)["num_attention_heads"])


def head_width(shape: Mapping[str, Any]) -> int:
    return int(shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"])


@cache
def argument_names() -> frozenset[str]:
    """Returns the fields of the installed vLLM's AsyncEngineArgs, read from its source, because importing vLLM imports
    torch; nothing where vLLM is not installed or its source is elsewhere."""
    found = find_spec("vllm")
    source = Path(found.origin).parent / "engine/arg_utils.py" if found is not None and found.origin else None
    if source is None or not source.is_file():
        return frozenset()
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    fields = (node for each in classes if each.name in ("EngineArgs", "AsyncEngineArgs") for node in each.body)
    return frozenset(
        node.target.id for node in fields if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    )
