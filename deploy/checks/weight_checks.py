"""Checks of what a run does with weights, before it starts: their way to generation, and its adapters."""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.engines.generation.forward.cache_size import ITEM_BYTES, blocks_within, engine_slots
from asyncrl.engines.generation.scheduling.block_pool import KV_BLOCK
from asyncrl.engines.lora.target_layers import adapted_names
from asyncrl.engines.model_shape import FLOAT, Shape, layers_of_stage, shape_of
from asyncrl.engines.models.model_folder import weight_files
from asyncrl.errors import ConfigError
from asyncrl.fleet.weight_transport import transport_of
from asyncrl.lanes.weights.version_folder import try_folder

NO_LAYERS = ("embed", "lm_head", "wte", "wpe")
"""Parts of the names of matrices that are no linear layers which an adapter could have."""

LayerShapes = dict[str, tuple[int, int]]
"""Outputs and inputs of layers by name."""


def transport_problems(config: Config) -> Iterator[Problem]:
    """Yields a problem when files of weights cannot be written, and a warning about a codec that is not used."""
    section = config.weights
    try:
        chosen = transport_of(config)
        if chosen.name == "file" and section.folder:
            try_folder(Path(section.folder).absolute())
    except ConfigError as error:
        key = "weights.folder" if str(error).startswith("weights.folder") else "weights.transport"
        yield Problem.of_error(error, key)
        return
    if section.codec != "dense" and section.transport == "auto" and chosen.name != "tcp":
        text = (
            f'nothing is encoded: transport "{chosen.name}" was chosen, because {chosen.reason}; remove it, or write '
            'weights.transport = "tcp"'
        )
        yield Problem("weights.codec", "", text, ("weights.transport",), is_warning=True)


def cache_problems(config: Config, model: str) -> Iterator[Problem]:
    """Yields a problem when `generation.cache_gb` is too small for the torch engine."""
    if config.generation.engine != "torch" or (shape := shape_of(model)) is None:
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
        chosen = adapted_names(lora, layers)
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
