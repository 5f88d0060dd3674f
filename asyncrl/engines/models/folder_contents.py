"""Checks that the files of a model folder belong together, by their headers and JSON, without reading weights.

What transformers does not find it makes at random, and what does not fit ends in a traceback of a worker.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from asyncrl.engines.models.model_folder import TOKENIZERS, is_complete, vocabulary, weight_files

EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|embed_in|word_embeddings)\.weight$")
"""Names of the tensor with a row for each token."""
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
READ_QUANTIZED = ("mxfp4",)
"""Kinds of quantization whose weights transformers loads as numbers with which a model trains."""
WHOLE = ("I8", "U8", "I16", "I32", "I64")
"""Types of safetensors that no weight has with which a model trains."""


def content_problems(folder: Path) -> Iterator[str]:
    """Yields what is wrong with a whole and undamaged model folder; a folder that holds no model has nothing."""
    if not is_complete(folder):
        return
    if not any(next(folder.glob(pattern), None) for pattern in TOKENIZERS):
        yield f"there is no tokenizer in {folder}: save it beside the model, by tokenizer.save_pretrained"
    shape = json.loads((folder / "config.json").read_bytes())
    if not shape.get("model_type"):
        yield f"{folder}/config.json names no model_type: take the config.json of the model that the weights are of"
        return
    kind = (shape.get("quantization_config") or {}).get("quant_method")
    if kind is not None and kind not in READ_QUANTIZED:
        yield f"the weights in {folder} are quantized ({kind}) and cannot be trained: take the model that was quantized"
        return
    yield from _tensor_problems(folder, shape.get("text_config") or shape)


def _tensor_problems(folder: Path, shape: Mapping[str, Any]) -> Iterator[str]:
    """Compares headers of weights with config.json and tokenizer. Added tokens may lie beyond the embedding, as the one
    for images of Gemma 3 does; texts do not hold it."""
    layers, rows, whole = set[int](), None, ""
    for name in weight_files(folder):
        with safe_open(folder / name, framework="np") as tensors:
            for tensor in tensors.keys():  # noqa: SIM118
                layers.update(int(found[1]) for found in LAYER.finditer(tensor))
                if EMBEDDING.search(tensor) and rows is None:
                    rows = int(tensors.get_slice(tensor).get_shape()[0])
                    kind = tensors.get_slice(tensor).get_dtype()
                    whole = kind if kind in WHOLE else ""
    if whole:
        yield f"the weights in {folder} are whole numbers ({whole}) and cannot be trained: take the model in bfloat16"
    expected = shape.get("num_hidden_layers")
    if layers and expected is not None and len(layers) < expected:
        yield f"the files in {folder} hold {len(layers)} layers, and its config.json has num_hidden_layers = {expected}"
    if rows is None:
        return
    if (size := shape.get("vocab_size")) is not None and size != rows:
        yield f"the embedding in {folder} has {rows} rows, and its config.json says vocab_size = {size}"
    elif (largest := max(vocabulary(folder, added=False), default=0)) >= rows:
        yield (
            f"the tokenizer in {folder} has ids up to {largest}, and the embedding {rows} rows: take the tokenizer of "
            "this model, or call model.resize_token_embeddings and save both"
        )
