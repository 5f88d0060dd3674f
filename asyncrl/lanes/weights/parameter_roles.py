"""Roles of the parameters of a model: weight decay, muon and codecs that round ask here, and nothing else tells a
tensor by its dimensions or by a list of names."""

import re
from enum import StrEnum
from typing import Any

from torch import nn

HEADS = ("lm_head", "score", "classifier")
"""Attributes that hold the output layer of a model."""
_ROUTER = re.compile(r"(^|\.)(gate|router)(\.|$)")
_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")


class Role(StrEnum):
    """VECTOR: a parameter of one dimension that is neither bias nor norm, as attention sinks are."""

    EMBEDDING = "embedding"
    POSITIONS = "positions"
    MATRIX = "matrix"
    EXPERTS = "experts"
    ROUTER = "router"
    HEAD = "head"
    BIAS = "bias"
    NORM = "norm"
    VECTOR = "vector"


MATRICES = frozenset((Role.EMBEDDING, Role.POSITIONS, Role.MATRIX, Role.EXPERTS, Role.ROUTER, Role.HEAD))
"""Roles that weight decay acts on."""
INNER = frozenset((Role.MATRIX, Role.ROUTER))
"""Roles between embeddings and output layer, of which muon takes those of two dimensions."""
ROUNDED = frozenset((Role.MATRIX, Role.EXPERTS))
"""Roles that stand a codec that rounds."""


def roles_of(model: Any) -> dict[str, Role]:
    """Returns the role of each parameter, under every name that it has; a tied one has that of its first name."""
    inputs = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    heads = {id(each) for each in (output, *(getattr(model, name, None) for name in HEADS)) if each is not None}
    modules, first = dict(model.named_modules()), dict[int, Role]()
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, own = name.rpartition(".")
        owner, around = modules[path], modules[path.rpartition(".")[0]]
        is_beside_experts = hasattr(around, "experts") and around is not owner
        if own.endswith("bias") or path.rpartition(".")[2] == "biases":
            role = Role.BIAS
        elif "norm" in type(owner).__name__.lower():
            role = Role.NORM
        elif isinstance(owner, nn.Embedding) or "embed" in own:
            role = Role.EMBEDDING if inputs is None or owner is inputs else Role.POSITIONS
        elif id(owner) in heads:
            role = Role.HEAD
        elif parameter.ndim < 2:
            role = Role.VECTOR
        elif _EXPERTS.search(path):
            role = Role.EXPERTS
        elif _ROUTER.search(path) or is_beside_experts:
            role = Role.ROUTER
        else:
            role = Role.MATRIX
        found[name] = first.setdefault(id(parameter), role)
    return found
