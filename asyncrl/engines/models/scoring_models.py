"""Checks that a scoring model (reward, cost, critics) fits the policy: its tokenizer, its head, and its context, beyond
which a model does not fail but computes nonsense."""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.engines.models.model_folder import (
    TOKENIZERS,
    chat_template_of,
    context_of_folder,
    existing_folder,
    is_complete,
    longest_row,
    refuse_damaged,
    vocabulary,
    weight_files,
)
from asyncrl.engines.models.model_preparation import cached_folder, hub_folder, is_hub_name
from asyncrl.errors import ConfigError

HEADS = ("score", "classifier")
"""Names of a classifier's head in transformers, which depend on the model family."""
ANOTHER_TOKENIZER = (
    "its tokenizer is not that of model.name, and it reads the policy's token ids, so it would score other texts than "
    "were generated; take a model with the same tokenizer, or let it read text (reward.reads, cost.reads)"
)


def head_labels(folder: Path) -> int | None:
    """Returns the number of labels of a classifier's head in an undamaged folder, from safetensors headers or else from
    config.json: 0 without a head, None where only loading would tell."""
    names = weight_files(folder)
    if not names:
        described = json.loads((folder / "config.json").read_bytes())
        return len(described.get("id2label") or ()) or described.get("num_labels")
    heads: set[str] = set()
    for name in names:
        with safe_open(folder / name, framework="np") as tensors:
            heads |= {tensor for tensor in tensors.keys() if tensor.split(".")[0] in HEADS}  # noqa: SIM118
            if weight := next((f"{head}.weight" for head in HEADS if f"{head}.weight" in heads), None):
                return int(tensors.get_slice(weight).get_shape()[0])
    return None if heads else 0


def scoring_model_folders(config: Config, policy: Path, noted: Path | None = None) -> dict[str, Path]:
    """Returns the model folder of each service that scores or values samples, by service; a critic without a `model`
    starts from the folder of the policy. noted: as in `hub_folder`. Raises ConfigError like `scoring_model_folder`."""
    folders = {"critic": policy, "cost_critic": policy}
    for service in ("reward", "cost", "critic", "cost_critic"):
        if name := getattr(config, service).model:
            folders[service] = scoring_model_folder(config, name, f"{service}.model", policy, noted)
    return folders


def scoring_model_problems(config: Config, policy: Path) -> Iterator[Problem]:
    """Yields what `scoring_model_folders` would refuse, as far as the models are here; it downloads nothing. policy:
    folder of the policy, which need not be there yet."""
    for service in ("reward", "cost", "critic", "cost_critic"):
        key = f"{service}.model"
        name = getattr(config, service).model
        is_of_hub = "/" in name and is_hub_name(name)
        try:
            folder = (existing_folder(name, key) or (is_of_hub and cached_folder(name)) or None) if name else None
            if folder is not None and is_complete(policy):
                scoring_model_folder(config, str(folder), key, policy)
            elif folder is None and name and not is_of_hub:
                _of_hub(name, key, None)
        except ConfigError as error:
            yield Problem.of_error(error, key)


def scoring_model_folder(config: Config, name: str, key: str, policy: Path, noted: Path | None = None) -> Path:
    """Returns the folder that `key` names, of the hub's cache if it is a name there. noted: as in `hub_folder`.
    Raises ConfigError when it is missing, holds no model, is damaged, has no tokenizer or not that of the policy, a
    head with several outputs, or a context shorter than the longest row. A model that reads text has a tokenizer and
    rows of its own, and needs a chat template."""
    folder = existing_folder(name, key) or _of_hub(name, key, noted)
    refuse_damaged(folder)
    if not any(next(folder.glob(pattern), None) for pattern in TOKENIZERS):
        raise ConfigError(f"{key}: there is no tokenizer in {folder}; save that of model.name beside it")
    if getattr(getattr(config, key.partition(".")[0]), "reads", "") == "text":
        _refuse_to_read_text(config, folder, key)
        _refuse_other_heads(folder, key)
        return folder.absolute()
    own = vocabulary(folder)
    others = vocabulary(policy)
    if own and others and own != others:
        raise ConfigError(f"{key}: {ANOTHER_TOKENIZER}")
    _refuse_other_heads(folder, key)
    context = context_of_folder(folder)
    longest = longest_row(config, context_of_folder(policy))
    if context is not None and context < longest:
        raise ConfigError(
            f"{key}: {folder} was made for {context} positions (max_position_embeddings in its config.json), and a "
            f"prompt with its answer may have {longest} tokens: write a smaller task.max_prompt_tokens or "
            "generation.max_new_tokens, or take a model with a longer context"
        )
    return folder.absolute()


def _of_hub(name: str, key: str, noted: Path | None) -> Path:
    if "/" not in name or not is_hub_name(name):
        raise ConfigError(f"{key}: there is no folder {name}; write one that from_pretrained loads")
    return hub_folder(name, key, noted=noted)


def _refuse_to_read_text(config: Config, folder: Path, key: str) -> None:
    """Raises ConfigError where a model cannot read prompts and answers as text."""
    section = key.partition(".")[0]
    if config.environment.use:
        raise ConfigError(
            f'{section}.reads: "text" is for single answers, and the samples of this experiment are episodes: score '
            "them by functions, or by a model with the tokenizer of model.name"
        )
    if not chat_template_of(folder):
        raise ConfigError(f"{key}: there is no chat template in {folder}, with which it could read a conversation")


def _refuse_other_heads(folder: Path, key: str) -> None:
    """Raises ConfigError when the head does not have one output. Only a critic may start without a head."""
    labels = head_labels(folder)
    if "critic" in key:
        if labels is not None and labels > 1 and next(folder.glob("*.safetensors"), None):
            raise ConfigError(
                f"{key}: the head of {folder} has {labels} labels, and a value is one number; take one of 1 label"
            )
    elif labels is not None and labels != 1:
        found = f"the head of {folder} has {labels} labels" if labels else f"{folder} has no head that scores"
        raise ConfigError(
            f"{key}: {found}, and a score is one number; take a folder that AutoModelForSequenceClassification with "
            "num_labels=1 was saved to after training"
        )
