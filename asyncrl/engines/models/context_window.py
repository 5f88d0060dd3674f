"""How many positions a model was made for, and whether prompts with their answers fit: nothing fails beyond them, the
model only writes nonsense, which would be trained."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError

POSITIONS = ("max_position_embeddings", "n_positions")
STRETCHED = ("linear", "dynamic", "yarn")
"""Ways to scale rotary positions whose factor is not part of the config's number of positions already."""


def context_of(shape: Mapping[str, Any]) -> int | None:
    """Positions of a model by its config.json; None: it names no bound."""
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
    """Tokens of the longest prompt and its longest answer, which end with the positions of the model."""
    tokens = config.task.max_prompt_tokens + config.generation.max_new_tokens
    return tokens if context is None else min(tokens, context)


def refuse_without_context(config: Config, folder: Path) -> None:
    """Raises ConfigError when not even a prompt of one token leaves room for an answer. A folder without config.json is
    of services of one's own, which know their bounds themselves."""
    context, answer = _positions(folder), config.generation.max_new_tokens
    if context is not None and answer >= context:
        raise ConfigError(
            f"generation.max_new_tokens = {answer} leaves no room for a prompt: {config.model.name} was made for "
            f"{context} positions (max_position_embeddings in its config.json); write fewer than {context}"
        )


def refuse_short_judge(config: Config, key: str, folder: Path, policy: Path) -> None:
    """Raises ConfigError when a model that judges has fewer positions than the rows it is given may have tokens."""
    own, longest = _positions(folder), longest_row(config, _positions(policy))
    if own is not None and own < longest:
        raise ConfigError(
            f"{key}: {folder} was made for {own} positions (max_position_embeddings in its config.json), and a prompt "
            f"with its answer may have {longest} tokens: write a smaller task.max_prompt_tokens or "
            "generation.max_new_tokens, or take a model with more"
        )


def _positions(folder: Path) -> int | None:
    """None: a folder that names no bound, or without config.json."""
    described = folder / "config.json"
    return context_of(json.loads(described.read_text())) if described.exists() else None


@dataclass(frozen=True, slots=True)
class Room:
    """prompt, answer: the most tokens by the config; context: positions of the model, None: without bound."""

    prompt: int
    answer: int
    context: int | None = None

    def mistake(self, tokens: int) -> str | None:
        """What is wrong with a prompt of so many tokens, and what to do."""
        if tokens == 0:
            return "the prompt has no tokens: nothing of it is left by the model's tokenizer; write what to answer"
        if self.context is not None and tokens + self.answer > self.context:
            return (
                f"the prompt has {tokens} tokens, and with generation.max_new_tokens = {self.answer} its answer may "
                f"end beyond the {self.context} positions that the model was made for (max_position_embeddings): "
                f"shorten it{self._fewer(tokens)}"
            )
        if tokens > self.prompt:
            return (
                f"the prompt has {tokens} tokens and task.max_prompt_tokens is {self.prompt}: shorten it, or write "
                f"max_prompt_tokens = {tokens}"
            )
        return None

    def _fewer(self, tokens: int) -> str:
        assert self.context is not None
        return f", or write max_new_tokens = {self.context - tokens}" if tokens < self.context else ""
