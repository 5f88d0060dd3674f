"""Checks a model before a run: that the files of its folder belong together, by their headers and JSON, without reading
weights; that adapters name its layers, and its weights can reach generation.

What transformers does not find it makes at random, what does not fit ends in a traceback of a worker, and where
tokenizer, template and configs disagree about first and last tokens a run trains on other texts than are meant.
"""

import json
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.config.sections.training_config import ModelConfig
from asyncrl.engines.generation.block_pool import ITEM_BYTES, KV_BLOCK, blocks_within, engine_slots
from asyncrl.engines.generation.tokenization import Marks, configs_in, json_object, named_ends
from asyncrl.engines.models.model_folder import TOKENIZERS, is_complete, vocabulary, weight_files
from asyncrl.engines.models.model_preparation import cached_folder, is_hub_name, why_not
from asyncrl.engines.models.model_shape import FLOAT, Shape, layers_of_stage, shape_of
from asyncrl.errors import ConfigError
from asyncrl.fleet.weight_transport import transport_of
from asyncrl.lanes.weights.version_folder import try_folder

EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|embed_in|word_embeddings)\.weight$")
"""Names of the tensor with a row for each token."""
HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.weight$")
"""Names of the tensor of the output layer."""
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
READ_QUANTIZED = ("mxfp4",)
"""Kinds of quantization whose weights transformers loads as numbers with which a model trains."""
WHOLE = ("I8", "U8", "I16", "I32", "I64")
"""Types of safetensors that no weight has with which a model trains."""
COMPARED = 16 << 20
"""Bytes of two tensors that are compared at a time."""


def content_problems(folder: Path, stop: Sequence[str] = ()) -> Iterator[Problem]:
    """Yields what is wrong with a whole and undamaged model folder; a folder that holds no model has nothing. stop:
    strings that end answers besides the ends of the folder."""
    if is_complete(folder):
        marks = Marks.of_folder(folder)
        rows = embedding_rows(folder)
        notes = ((each, True) for each in _end_notes(folder, marks, rows, stop))
        wrong = ((each, False) for each in [*_file_problems(folder)] or _written_beyond(folder, marks, rows))
        yield from (Problem("model.name", "", text, is_warning=is_note) for text, is_note in (*wrong, *notes))


def _file_problems(folder: Path) -> Iterator[str]:
    if not any(next(folder.glob(pattern), None) for pattern in TOKENIZERS):
        yield f"there is no tokenizer in {folder}: save it beside the model, by tokenizer.save_pretrained"
    shape = json.loads((folder / "config.json").read_bytes())
    kind = (shape.get("quantization_config") or {}).get("quant_method")
    if not shape.get("model_type"):
        yield f"{folder}/config.json names no model_type: take the config.json of the model that the weights are of"
    elif kind is not None and kind not in READ_QUANTIZED:
        yield f"the weights in {folder} are quantized ({kind}) and cannot be trained: take the model that was quantized"
    else:
        yield from _tensor_problems(folder, shape)


def _tensor_problems(folder: Path, described: Mapping[str, Any]) -> Iterator[str]:
    """Compares headers of weights with config.json and tokenizer. Added tokens may lie beyond the embedding, as the one
    for images of Gemma 3 does, where no text holds them."""
    shape = described.get("text_config") or described
    layers = set[int]()
    rows = None
    whole = ""
    tied = dict[str, Path]()
    for name in weight_files(folder):
        with safe_open(folder / name, framework="np") as tensors:
            for tensor in tensors.keys():  # noqa: SIM118
                layers.update(int(found[1]) for found in LAYER.finditer(tensor))
                if HEAD.search(tensor) or EMBEDDING.search(tensor):
                    tied[tensor] = folder / name
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
    if len(tied) == 2 and not _are_equal(*tied.items()) and _is_tied(folder, described):
        first, second = sorted(tied)
        yield (
            f"{folder}/config.json says that {first} and {second} are one tensor (tie_word_embeddings), and the files "
            "hold two different ones, which would train apart: write tie_word_embeddings = false there if both are "
            "meant, else save the model without the head that is not meant"
        )


def _is_tied(folder: Path, described: Mapping[str, Any]) -> bool:
    """Returns whether the output layer is the embedding; where config.json does not say it, its family does."""
    named = [each["tie_word_embeddings"] for each in configs_in(described) if "tie_word_embeddings" in each]
    if named:
        return bool(named[0])
    from transformers import AutoConfig  # Takes seconds, and is asked of very few folders.

    return bool(AutoConfig.from_pretrained(folder).get_text_config().tie_word_embeddings)


def _are_equal(first: tuple[str, Path], second: tuple[str, Path]) -> bool:
    """Returns whether two tensors of safetensors files have the same type, shape and bytes."""
    (kind, one), (other_kind, other) = _bytes_of(*first), _bytes_of(*second)
    places = range(0, len(one), COMPARED)
    return kind == other_kind and all(one[at : at + COMPARED] == other[at : at + COMPARED] for at in places)


def _bytes_of(name: str, path: Path) -> tuple[Any, memoryview]:
    """Returns type and shape of a tensor, and its bytes, which are mapped and not read."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        found = json.loads(file.read(size))[name]
        begin, end = found["data_offsets"]
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return (found["dtype"], found["shape"]), mapped[8 + size + begin : 8 + size + end]


def embedding_rows(folder: Path) -> int | None:
    """Returns how many ids a model has, by its config.json, to which its files are held; None where it does not say."""
    sizes = [
        int(each["vocab_size"]) for each in configs_in(json_object(folder / "config.json")) if "vocab_size" in each
    ]
    return sizes[0] if sizes else None


def beyond_embedding(folder: Path) -> dict[str, int]:
    """Returns the added tokens that a model has no row for, with their ids."""
    rows = embedding_rows(folder)
    return {} if rows is None else {text: at for text, at in Marks.of_folder(folder).ids.items() if at >= rows}


def _written_beyond(folder: Path, marks: Marks, rows: int | None) -> Iterator[str]:
    """Yields the tokens beyond the embedding that the template or the tokenizer itself writes."""
    beyond = {text: at for text, at in marks.ids.items() if rows is not None and at >= rows}
    if not beyond:
        return
    around = json.dumps(json_object(folder / "tokenizer.json").get("post_processor"), ensure_ascii=False)
    rendered = marks.rendered()
    for text, at in beyond.items():
        names = [key for key, value in marks.names.items() if value == text]
        by_template = text in marks.template or text in rendered or any(key in marks.template for key in names)
        if by_template or json.dumps(text, ensure_ascii=False) in around:
            yield (
                f"the {'chat template' if by_template else 'tokenizer'} in {folder} writes {text} (id {at}), and the "
                f"embedding has {rows} rows: call model.resize_token_embeddings and save the model, or take the "
                "tokenizer and template that it was trained with"
            )


def _end_notes(folder: Path, marks: Marks, rows: int | None, stop: Sequence[str]) -> Iterator[str]:
    """Yields what a run does where the configs do not name the end of an answer."""
    if not vocabulary(folder):
        return  # Only loading the tokenizer would tell.
    ends = named_ends(folder, marks)
    end = marks.turn_end()
    if end and marks.ids[end] not in ends:
        line = json.dumps(sorted(ends | {marks.ids[end]}))
        yield (
            f"the chat template in {folder} closes answers with {end} (id {marks.ids[end]}), which its configs do not "
            f'name as an end: answers end there too; write "eos_token_id": {line} in its generation_config.json, so '
            "that other programs do the same"
        )
    elif not any(rows is None or at < rows for at in ends) and not stop and not _has_default_end(folder, marks):
        yield (
            f"{folder} names no end of an answer (eos_token_id in generation_config.json, eos_token in "
            'tokenizer_config.json), so each is as long as generation.max_new_tokens: write "eos_token_id" there, or '
            "generation.stop"
        )


def _has_default_end(folder: Path, marks: Marks) -> bool:
    """Returns whether the class of a tokenizer has an end where its files name none."""
    if "eos_token" in marks.names:
        return False
    from transformers import AutoTokenizer  # Takes seconds, and is asked of very few folders.

    return AutoTokenizer.from_pretrained(folder).eos_token_id is not None


def may_end_texts(folder: Path) -> bool:
    """Returns whether the tokenizer's files speak of a token behind each text; only loading it tells."""
    around = json_object(folder / "tokenizer.json").get("post_processor") or {}
    several = around.get("processors") or [around]
    ends = any("SpecialToken" in (each.get("single") or [{}])[-1] or "sep" in each for each in several)
    return ends or bool(json_object(folder / "tokenizer_config.json").get("add_eos_token"))


def here(model: ModelConfig) -> Path:
    """Returns the folder of the policy if it is on this machine, in the cache too; else the path of a name."""
    return (is_hub_name(model.name) and cached_folder(model.name, model.revision)) or Path(model.name).expanduser()


def unreachable_models(models: Mapping[str, tuple[str, str]]) -> Iterator[Problem]:
    """Yields models of the hub that the cache lacks where HF_HUB_OFFLINE forbids to download them. models: name and
    revision by key."""
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import OfflineModeIsEnabled

    for key, (name, revision) in models.items():
        if is_offline_mode() and is_hub_name(name) and cached_folder(name, revision) is None:
            yield Problem(key, "", why_not(name, revision, OfflineModeIsEnabled()))


# Checks of what a run does with weights, before it starts: their way to generation, and its adapters.


NO_LAYERS = ("embed", "lm_head", "wte", "wpe")
"""Parts of the names of matrices that are no linear layers which an adapter could have."""

LayerShapes = dict[str, tuple[int, int]]
"""Outputs and inputs of layers by name."""


def transport_problems(config: Config) -> Iterator[Problem]:
    """Yields a problem when files of weights cannot be written, and a warning about a codec that is not used."""
    section = config.weights
    try:
        chosen = transport_of(config)
        if chosen.facts.in_folder and section.folder:
            try_folder(Path(section.folder).absolute())
    except ConfigError as error:
        key = "weights.folder" if str(error).startswith("weights.folder") else "weights.transport"
        yield Problem.of_error(error, key)
        return
    if section.codec != "dense" and section.transport == "auto" and not chosen.facts.encodes:
        text = (
            f'nothing is encoded: transport "{chosen.name}" was chosen, because {chosen.reason}; remove it, or write '
            'weights.transport = "tcp"'
        )
        yield Problem("weights.codec", "", text, ("weights.transport",), is_warning=True)


def cache_problems(config: Config, model: str) -> Iterator[Problem]:
    """Yields a problem when `generation.cache_gb` is too small for the torch engine."""
    if not config.generation.engine_facts.is_own or (shape := shape_of(model)) is None:
        return
    block = KV_BLOCK * shape.cache_bytes_per_token * ITEM_BYTES[config.model.dtype] // FLOAT
    layout = config.generation.layout  # Ranks that sample together share out heads and layers.
    held = len(layers_of_stage(shape.layers, config.training.layout.pp, layout.pp, 0))
    block = block // layout.tp * held // shape.layers
    try:
        blocks_within(config, block, engine_slots(config))
    except ConfigError as error:
        yield Problem.of_error(error, "generation.cache_gb")


def adapter_problems(config: Config, model: str) -> Iterator[Problem]:
    """Yields a problem when `model.lora` names no layer of a model on this machine, and a warning about too large a
    rank."""
    lora = config.model.lora
    layers = layers_of(model)
    if lora is None or not layers:
        return
    try:
        chosen = lora.adapted(layers)
    except ConfigError as error:
        yield Problem.of_error(error, "model.lora")
        return
    if too_small := {name: size for name in chosen if (size := min(layers[name])) < lora.rank}:
        name = min(too_small, key=lambda each: (too_small[each], each))
        text = (
            f"rank {lora.rank} is more than {len(too_small)} of {len(chosen)} layers can use, such as {name} with "
            f"{layers[name][0]} outputs and {layers[name][1]} inputs: write a rank of at most {too_small[name]}"
        )
        yield Problem("model.lora", "", text, is_warning=True)


def layers_of(model: str) -> LayerShapes:
    """Returns the matrices of a model, of which some may be no linear layers; nothing for one that is not on this
    machine or whose files name its layers in another way than transformers."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return {} if (shape := shape_of(model)) is None else _layers_of_shape(shape)
    try:
        if any("expert" in key for key in json.loads((folder / "config.json").read_text())):
            return {}
        return dict(_matrices(folder))
    except (OSError, ValueError, SafetensorError):
        return {}


def _layers_of_shape(shape: Shape) -> LayerShapes:
    """Returns the layers of a Llama of this shape."""
    found = {}
    for number in range(shape.layers):
        for name, inputs, outputs in shape.linear:
            part = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            found[f"model.layers.{number}.{part}.{name}"] = (outputs, inputs)
    return found


def _matrices(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    for file_name in weight_files(folder):
        with safe_open(folder / file_name, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                shape = file.get_slice(name).get_shape()
                layer, _, kind = name.rpartition(".")
                if kind == "weight" and len(shape) == 2 and not any(part in layer for part in NO_LAYERS):
                    yield layer, (shape[0], shape[1])
