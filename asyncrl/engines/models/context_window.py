"""The context length of a model, and checks that prompts with their answers fit into it.

Beyond its context length a model does not fail but generates nonsense, which would be trained on.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config

POSITIONS = ("max_position_embeddings", "n_positions")
STRETCHED = ("linear", "dynamic", "yarn")
"""Kinds of rotary scaling whose factor is not yet part of the number of positions in the config."""


def context_of(shape: Mapping[str, Any]) -> int | None:
    """Returns the context length in tokens from the contents of config.json, or None if it names none."""
    shape = shape.get("text_config") or shape
    known = next((int(shape[name]) for name in POSITIONS if shape.get(name)), None)
    if known is None:
        return None
    scaling = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type")) not in STRETCHED:
        return known
    original = scaling.get("original_max_position_embeddings") or known
    return max(known, int(original * float(scaling.get("factor") or 1.0)))


def longest_row(config: Config, context: int | None = None) -> int:
    """Returns the tokens of the longest prompt with its longest answer, at most `context`."""
    tokens = config.task.max_prompt_tokens + config.generation.max_new_tokens
    return tokens if context is None else min(tokens, context)


def context_problems(config: Config, folder: Path) -> Iterator[Problem]:
    """Yields a problem when the longest answer leaves no room for a prompt in the context of the model.

    A folder without config.json belongs to user-defined services and is not checked.
    """
    context, answer = context_of_folder(folder), config.generation.max_new_tokens
    if context is not None and answer >= context:
        text = (
            f"{answer} new tokens leave no room for a prompt: {config.model.name} was made for {context} positions "
            f"(max_position_embeddings in its config.json); write fewer than {context}"
        )
        yield Problem("generation.max_new_tokens", "", text)


def context_of_folder(folder: Path) -> int | None:
    path = folder / "config.json"
    return context_of(json.loads(path.read_text())) if path.exists() else None
