"""The weights of a model folder, to be read by slices: a rank that trains a part of a model reads that part alone.

    model-00001-of-2.safetensors   layers.0.q_proj.weight [16, 8] ── rows 0 to 8 ──> rank 0
                                                                   └─ rows 8 to 16 ─> rank 1

The names in files are mapped to those of the model by transformers' own rules. Of its conversions one is made by
slices: experts that are stored one by one are put side by side in one tensor of all experts.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from asyncrl.engines.models.model_folder import weight_files
from asyncrl.engines.models.tensor_parts import STORED_TYPES, StoredTensor

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
