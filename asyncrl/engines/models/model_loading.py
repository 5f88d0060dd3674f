"""Loads models with transformers, whole or by slices of their files, and scales their logits as their family does.

A process loads one model at a time, quietly, and into private memory, because every process that reads weights mapped
from a file is killed by SIGBUS when the file is truncated later.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.utils import logging

from asyncrl.engines.models.model_folder import GENERATION, refuse_damaged, weight_files
from asyncrl.engines.models.prompt_pictures import WITH_PICTURES
from asyncrl.engines.models.scoring_models import HEADS
from asyncrl.engines.models.tensor_parts import STORED_TYPES, StoredTensor
from asyncrl.errors import ConfigError

# Scales and soft caps that some families put on the logits behind the output layer.


@dataclass(frozen=True, slots=True)
class OutputScaling:
    """factor: logits are multiplied with it (Cohere's logit_scale, 1 / Granite's logits_scaling). cap: logits x become
    cap x tanh(x / cap) (Gemma 2, arXiv 2408.00118); None: they stay."""

    factor: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> Self:
        """Reads it from a config of transformers."""
        shape = config.get_text_config()
        factor = (getattr(shape, "logit_scale", None) or 1.0) / (getattr(shape, "logits_scaling", None) or 1.0)
        return cls(factor, getattr(shape, "final_logit_softcapping", None))

    def apply(self, logits: Tensor) -> Tensor:
        """Returns the scaled logits; the same tensor where nothing is to be done."""
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


NAMED = 3
"""Tensors that a message names."""

_loading = threading.Lock()  # transformers patches global state of torch while it loads a model


def vocabulary_size(tokenizer: Any) -> int:
    """Returns one more than the largest token id; ids below it may name no token, so the count of tokens is less."""
    return 1 + int(max(tokenizer.get_vocab().values()))


@contextmanager
def _exclusive_and_quiet() -> Iterator[None]:
    """Serialises loading and silences transformers, whose advice to train a head without weights is what we do."""
    with _loading:
        verbosity = logging.get_verbosity()
        bars = logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


def load_pretrained(folder: Path, **options: Any) -> Any:
    """Loads a causal model; safe in several threads. Raises ConfigError when a file of the folder is damaged, or
    weights are missing or of another shape."""
    refuse_damaged(folder)
    try:
        with _exclusive_and_quiet():
            sees = AutoConfig.from_pretrained(folder).model_type in WITH_PICTURES
            kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
            model, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise ConfigError(
            f"model.name: weights in {folder} have other shapes than its config.json describes"
        ) from error
    if missing := sorted(info["missing_keys"]):
        named = ", ".join(missing[:NAMED]) + (f" and {len(missing) - NAMED} more" if len(missing) > NAMED else "")
        raise ConfigError(
            f"model.name: {folder} has no weights {named}, which its config.json describes: copy or download the model "
            "once more"
        )
    return _in_private_memory(model)


def unfilled_model(folder: Path, kind: Any, **options: Any) -> Any:
    """Makes a model of an automatic class of transformers from a config. Its parameters are on the meta device, without
    memory, until ranks fill their parts; its buffers are as a loaded model has them. Safe in several threads."""
    with _exclusive_and_quiet():
        with torch.device("meta"):
            model = kind.from_config(**options).eval()
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, torch.empty_like(buffer, device="cpu"), name in module.state_dict())
        model.initialize_weights()  # Computes buffers; to draw parameters without memory changes no random state.
        if model.can_generate() and (folder / GENERATION).is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def load_pretrained_classifier(folder: Path, kind: Any, role: str, **options: Any) -> tuple[Any, list[str]]:
    """Loads a classifier of an automatic class of transformers; returns it with the names of the head's parameters that
    the folder lacks. Raises ConfigError, which names the role, when a file is damaged, transformers has no such model,
    the head has another number of labels, or parameters outside the head are missing."""
    refuse_damaged(folder)
    try:
        with _exclusive_and_quiet():
            model, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    except ValueError as error:
        raise ConfigError(f"model {folder} cannot be a {role}: {error}") from error
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise ConfigError(f"model {folder} cannot be a {role}: its head has another number of labels than 1") from error
    missing = sorted(info["missing_keys"])
    if body := [name for name in missing if name.split(".")[0] not in HEADS]:
        raise ConfigError(f"model {folder} cannot be a {role}: it has no weights {', '.join(body[:3])}")
    return _in_private_memory(model), missing


def _in_private_memory(model: Any) -> Any:
    for tensor in chain(model.parameters(), model.buffers()):
        tensor.data = tensor.data.clone()
    return model


# The weights of a model folder, to be read by slices: a rank that trains a part of a model reads that part alone.
#
#     model-00001-of-2.safetensors   layers.0.q_proj.weight [16, 8] ── rows 0 to 8 ──> rank 0
#                                                                    └─ rows 8 to 16 ─> rank 1
#
# The names in files are mapped to those of the model by transformers' own rules. Of its conversions one is made by
# slices: experts that are stored one by one are put side by side in one tensor of all experts.


EXPERT = re.compile(r"\.experts\.(\d+)\.")


class NotInSlices(Exception):
    """The weights cannot be read by slices; the text says why. It never leaves the loading of a model."""


def sliced_weights(folder: Path, model: Any, missing: frozenset[str] = frozenset()) -> dict[str, StoredTensor]:
    """Returns the tensors of a folder by the names of a transformers model, of which nothing is read yet, tied ones
    under each name. missing: names that the folder may lack. Raises NotInSlices when transformers would change what is
    stored, and where something is missing or has another shape, which transformers reports."""
    names = weight_files(folder)
    if not names:
        raise NotInSlices("its weights are not in safetensors")
    if getattr(model.config, "quantization_config", None) is not None:
        raise NotInSlices("its weights are quantized")
    state = model.state_dict(keep_vars=True)
    mapping = _NameMapping(model, state)
    found: dict[str, StoredTensor] = {}
    for name in names:
        mapping.add_all(found, safe_open(folder / name, framework="pt"))
    return _complete(found, {name: each for name, each in state.items() if name in found or name not in missing})


class _NameMapping:
    """Maps names in files to those of a model, as transformers does."""

    def __init__(self, model: Any, state: Mapping[str, Any]) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._state = state

    def add_all(self, found: dict[str, StoredTensor], file: Any) -> None:
        """Adds what a file holds of the model. Raises NotInSlices."""
        keys = file.keys()
        for key in keys:
            stored = file.get_slice(key)
            name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self._state)
            if name not in self._state:
                continue  # transformers leaves it out, too.
            if stored.get_dtype() not in STORED_TYPES:
                raise NotInSlices(f"{key} has the type {stored.get_dtype()}")
            shape = tuple(stored.get_shape())
            offsets: tuple[int, ...] = (0,) * len(shape)
            if pattern is not None:
                offsets, shape = self._place_of_expert(key, pattern, shape)
            tensor = found.setdefault(name, StoredTensor(name, STORED_TYPES[stored.get_dtype()]))
            tensor.add(file, offsets, shape, key)

    def _place_of_expert(
        self, key: str, pattern: str, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns where the matrix of one expert begins in the tensor of all of them, and its sizes there."""
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        operations = [(type(each), each.dim) for each in converter.operations if hasattr(each, "dim")]
        side_by_side = [(MergeModulelist, 0), (Concatenate, 1)][: 2 if len(converter.source_patterns) > 1 else 1]
        number = EXPERT.search(key)
        if len(operations) != len(converter.operations) or operations != side_by_side or number is None:
            raise NotInSlices(f"transformers converts {key}")
        row = converter.source_patterns.index(pattern) * shape[0]
        return (int(number[1]), row, *(0,) * (len(shape) - 1)), (1, *shape)


def _complete(found: Mapping[str, StoredTensor], state: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Returns the tensors of the model under each of their names. Raises NotInSlices where one is missing."""
    by_tensor: dict[int, list[StoredTensor]] = {}
    for name in found:
        by_tensor.setdefault(id(state[name]), []).append(found[name])
    complete: dict[str, StoredTensor] = {}
    for name, tensor in state.items():
        stored = by_tensor.get(id(tensor), [])
        if len(stored) != 1:
            raise NotInSlices(f"{name} is stored {len(stored)} times")
        if stored[0].shape != tuple(tensor.shape) or not stored[0].is_complete:
            raise NotInSlices(f"{name} has another shape in its file")
        complete[name] = stored[0]
    return complete
