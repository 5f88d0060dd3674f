"""Checks model folders by their JSON files, headers and sizes, without torch and without reading weights. A scoring
model (reward, cost, critics) must also fit the policy: its tokenizer, its head, its context, beyond which a model does
not fail but computes nonsense."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADS = ("score", "classifier")
"""Names of a classifier's head in transformers, which depend on the model family."""
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
TOKENIZERS = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")
"""Patterns of tokenizer files; every saved tokenizer has at least one of them."""
ANOTHER_TOKENIZER = (
    "its tokenizer is not that of model.name, and it reads the policy's token ids, so it would score other texts than "
    "were generated; take a model with the same tokenizer, or call yours from a reward function"
)
POSITIONS = ("max_position_embeddings", "n_positions")
STRETCHED = ("linear", "dynamic", "yarn")
"""Kinds of rotary scaling whose factor is not yet part of the number of positions in the config."""


def is_complete(folder: Path) -> bool:
    """Returns whether `folder` holds a model that `from_pretrained` can load."""
    return (folder / "config.json").exists() and any(next(folder.glob(each), None) for each in WEIGHT_FILES)


def existing_folder(name: str, key: str = "model.name") -> Path | None:
    """Returns the folder `name` or None if there is none. Raises ConfigError when it holds no model."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return None
    if is_complete(folder):
        return folder
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise ConfigError(f"{key}: {folder} holds no model: config.json and *.safetensors are needed, found are {found}")


def refuse_damaged(folder: Path) -> None:
    """Raises ConfigError when files are damaged; the error names each of them."""
    if found := list(damages(folder)):
        raise ConfigError(
            f"model.name: {'; '.join(found)}. Get {'it' if len(found) == 1 else 'them'} again: copy or download the "
            "model once more; a folder that a run made for itself is made again when you remove it"
        )


def head_labels(folder: Path) -> int | None:
    """Returns the number of labels of a classifier's head in an undamaged folder, from safetensors headers or else from
    config.json: 0 without a head, None where only loading would tell."""
    names = _weight_files(folder)
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


def damages(folder: Path) -> Iterator[str]:
    """Yields one clause for each file that cannot be loaded."""
    for path in sorted(folder.glob("*.json")):
        try:
            json.loads(path.read_bytes())
        except ValueError:
            yield f"{path} is cut short or damaged: it is not JSON"
    for name in _weight_files(folder):
        path = folder / name
        try:
            with safe_open(path, framework="np"):
                pass
        except FileNotFoundError:
            yield f"{path} is missing, and {INDEX} names it"
        except SafetensorError as error:
            yield f"{path} is cut short or damaged: it has {path.stat().st_size} bytes. {error}"


def _weight_files(folder: Path) -> list[str]:
    """Returns the names of the weight files that transformers loads; a damaged index names none."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    with suppress(OSError, ValueError):
        return sorted(set(json.loads((folder / INDEX).read_bytes()).get("weight_map", {}).values()))
    return []


def scoring_model_folders(config: Config, policy: Path) -> dict[str, Path]:
    """Returns the model folder of each service that scores or values samples, by service; a critic without a `model`
    starts from the folder of the policy. Raises ConfigError like `scoring_model_folder`."""
    folders = {"critic": policy, "cost_critic": policy}
    for service in ("reward", "cost", "critic", "cost_critic"):
        if name := getattr(config, service).model:
            folders[service] = scoring_model_folder(config, name, f"{service}.model", policy)
    return folders


def scoring_model_folder(config: Config, name: str, key: str, policy: Path) -> Path:
    """Returns the folder that `key` names. Raises ConfigError when it is missing, holds no model, is damaged, has no
    tokenizer or not that of the policy, a head with several outputs, or a context shorter than the longest row."""
    folder = existing_folder(name, key)
    if folder is None:
        raise ConfigError(f"{key}: there is no folder {name}; write one that from_pretrained loads")
    refuse_damaged(folder)
    if not any(next(folder.glob(pattern), None) for pattern in TOKENIZERS):
        raise ConfigError(f"{key}: there is no tokenizer in {folder}; save that of model.name beside it")
    own, others = vocabulary(folder), vocabulary(policy)
    if own and others and own != others:
        raise ConfigError(f"{key}: {ANOTHER_TOKENIZER}")
    _refuse_other_heads(folder, key)
    context, longest = context_of_folder(folder), longest_row(config, context_of_folder(policy))
    if context is not None and context < longest:
        raise ConfigError(
            f"{key}: {folder} was made for {context} positions (max_position_embeddings in its config.json), and a "
            f"prompt with its answer may have {longest} tokens: write a smaller task.max_prompt_tokens or "
            "generation.max_new_tokens, or take a model with a longer context"
        )
    return folder.absolute()


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


def vocabulary(folder: Path) -> dict[int, str]:
    """Returns the tokens by id from tokenizer.json, or nothing where that file does not list them."""
    try:
        described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        known = described["model"]["vocab"]
        by_token = known.items() if isinstance(known, dict) else ((entry[0], i) for i, entry in enumerate(known))
        added = {int(each["id"]): str(each["content"]) for each in described.get("added_tokens") or ()}
        return {int(number): str(token) for token, number in by_token} | added
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}


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


def context_of_folder(folder: Path) -> int | None:
    """Returns the context length of a model folder, or None for a folder without config.json, of other services."""
    path = folder / "config.json"
    return context_of(json.loads(path.read_text())) if path.exists() else None
