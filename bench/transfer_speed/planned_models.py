"""Tensors of models for `asyncrl-bench weights`: from the published sizes, or from a folder of safetensors."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.lanes.weights.plan.parallel_layout import DecoderSizes
from asyncrl.lanes.weights.plan.placements import CheckpointTensor

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}
"""Names of dtypes in safetensors, with those of a plan."""

MAX_HEADER = 100 << 20
"""Bytes of a header that safetensors allows."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """Holds the values of a published config.json that decide the shapes. intermediate: of one expert, if there are
    experts; tied: the head is the embedding; biases: of q, k and v; head_norms: of each query and key head."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    head: int = 128
    tied: bool = False
    biases: bool = False
    head_norms: bool = False
    experts: int = 0

    @property
    def sizes(self) -> DecoderSizes:
        return DecoderSizes(self.layers, self.heads, self.kv_heads, self.experts)

    def tensors(self) -> list[CheckpointTensor]:
        """Returns the tensors of the checkpoint in bfloat16."""
        return [CheckpointTensor(name, shape) for name, shape in self._shapes()]

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield f"{prefix}input_layernorm.weight", (self.hidden,)
            yield f"{prefix}post_attention_layernorm.weight", (self.hidden,)
            yield from self._attention(f"{prefix}self_attn.")
            yield from self._mlp(f"{prefix}mlp.")
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, self.hidden)

    def _attention(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            yield f"{prefix}{name}_proj.weight", (heads * self.head, self.hidden)
            if self.biases:
                yield f"{prefix}{name}_proj.bias", (heads * self.head,)
            if self.head_norms and name != "v":
                yield f"{prefix}{name}_norm.weight", (self.head,)
        yield f"{prefix}o_proj.weight", (self.hidden, self.heads * self.head)

    def _mlp(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        if self.experts:
            yield f"{prefix}gate.weight", (self.experts, self.hidden)
        for part in [f"experts.{expert}." for expert in range(self.experts)] or [""]:
            yield f"{prefix}{part}gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}{part}up_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}{part}down_proj.weight", (self.hidden, self.intermediate)


MODELS = {
    "qwen2.5-0.5b": PublishedModel(896, 24, 14, 2, 4864, 151936, head=64, tied=True, biases=True),
    "qwen2.5-7b": PublishedModel(3584, 28, 28, 4, 18944, 152064, biases=True),
    "qwen2.5-72b": PublishedModel(8192, 80, 64, 8, 29568, 152064, biases=True),
    "llama-3.1-8b": PublishedModel(4096, 32, 32, 8, 14336, 128256),
    "qwen3-30b-a3b": PublishedModel(2048, 48, 32, 4, 768, 151936, head_norms=True, experts=128),
}
"""Models by name."""


def planned_model(name: str) -> tuple[list[CheckpointTensor], DecoderSizes]:
    """Returns the tensors and sizes of a model. name: a key of MODELS, or a folder with config.json and safetensors.

    Raises ValueError for another name, or a folder that lacks them or has a dtype that no plan knows.
    """
    if name.lower() in MODELS:
        model = MODELS[name.lower()]
        return model.tensors(), model.sizes
    folder = Path(name)
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise ValueError(
            f"{name!r} is no model: name one of {', '.join(MODELS)}, or a folder with config.json and *.safetensors"
        )
    config = json.loads((folder / "config.json").read_text())
    try:
        heads = int(config["num_attention_heads"])
        sizes = DecoderSizes(
            int(config["num_hidden_layers"]),
            heads,
            int(config.get("num_key_value_heads") or heads),
            int(config.get("num_experts") or config.get("num_local_experts") or 0),
        )
    except KeyError as missing:
        raise ValueError(f"{folder / 'config.json'} has no {missing}, which says how the model can be cut") from None
    return [tensor for file in files for tensor in _tensors_of(file)], sizes


def _tensors_of(file: Path) -> list[CheckpointTensor]:
    """Reads the header of a safetensors file: eight bytes of its size, little-endian, then JSON."""
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))
        if not 2 <= size <= MAX_HEADER:
            raise ValueError(f"{file} is no safetensors file: its header would have {size} bytes")
        header: dict[str, Any] = json.loads(opened.read(size))
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} of {file} has dtype {entry['dtype']}; a plan knows {', '.join(DTYPES)}")
        found.append(CheckpointTensor(name, tuple(entry["shape"]), DTYPES[entry["dtype"]]))
    return found
