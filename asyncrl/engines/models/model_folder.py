"""Model folders by their JSON files, headers and sizes, without torch: what they hold, what of it is damaged, how long
its rows may be, and the digest of its weights."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from xxhash import xxh3_128_hexdigest

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTERS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""The files of peft. A folder with the second one holds adapters of another model."""
PARTS = "parts"
"""Folder of a checkpoint beside `model/`, where several ranks wrote parts of its weights."""
EXPORTED = "asyncrl_export.json"
"""File of a folder that `asyncrl export` wrote, which tells the version of its weights."""
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
TOKENIZERS = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")
"""Patterns of tokenizer files; every saved tokenizer has at least one of them."""
CRITICS = ("critic", "cost_critic")
"""Services whose models are in folders of a checkpoint beside `model/`."""
POSITIONS = ("max_position_embeddings", "n_positions")
STRETCHED = ("linear", "dynamic", "yarn")
"""Kinds of rotary scaling whose factor is not yet part of the number of positions in the config."""


def is_complete(folder: Path) -> bool:
    """Returns whether `folder` holds a model that `from_pretrained` can load."""
    return (folder / "config.json").exists() and any(next(folder.glob(each), None) for each in WEIGHT_FILES)


def is_in_parts(folder: Path) -> bool:
    """Returns whether `folder` is the `model/` of a checkpoint whose weights are in parts beside it."""
    return folder.name == "model" and (folder.parent / PARTS).is_dir()


def exported_version(folder: Path) -> int:
    """Returns the version of the weights in a folder that `asyncrl export` wrote; 0 for any other model. Raises
    ConfigError when the file that tells it is damaged."""
    path = folder / EXPORTED
    try:
        return int(json.loads(path.read_bytes())["version"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: write the folder once more with `asyncrl export`") from error


def sync_to_disk(path: Path) -> None:
    """Makes a file, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def existing_folder(name: str, key: str = "model.name") -> Path | None:
    """Returns the folder `name` or None if there is none. Raises ConfigError when it holds no model."""
    folder = Path(name).expanduser()
    if folder.is_file():
        raise ConfigError(f"{key}: {name} is a file, and a model is a folder with config.json and *.safetensors")
    if not folder.is_dir():
        return None
    if is_complete(folder):
        return folder
    if (folder / ADAPTER_CONFIG).exists():
        raise ConfigError(
            f"{key}: {folder} holds adapters, and not the model that they belong to: evaluate the run that trained "
            "them, or write a model with `asyncrl export RUN FOLDER --merge` and name that folder"
        )
    if is_in_parts(folder):
        option = f" --model {folder.parent.name}" if folder.parent.name in CRITICS else ""
        raise ConfigError(
            f"{key}: the weights of {folder} are in parts, as the ranks of its run hold them: write the whole model "
            f"with `asyncrl export RUN FOLDER{option}`"
        )
    if (folder / "checkpoints").is_dir():
        raise ConfigError(
            f"{key}: {folder} is the directory of a run: `asyncrl export {folder} FOLDER` writes its model"
        )
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:8])
    found = f"found are {names}" if names else "and it is empty"
    raise ConfigError(f"{key}: {folder} holds no model: config.json and *.safetensors are needed, {found}")


def base_folder(run_dir: Path, config: Config) -> Path:
    """Returns the folder of the model that a run began with, which its adapters belong to. Raises ConfigError when it
    is gone."""
    folder = existing_folder(config.model.name) or run_dir / "model"
    if not is_complete(folder):
        raise ConfigError(
            f"model.name: {folder} holds no model any more, and the run has only adapters of it: put it back"
        )
    return folder


def refuse_damaged(folder: Path) -> None:
    """Raises ConfigError when files are damaged; the error names each of them."""
    if found := list(damages(folder)):
        raise ConfigError(
            f"model.name: {'; '.join(found)}. Get {'it' if len(found) == 1 else 'them'} again: copy or download the "
            "model once more; a folder that a run made for itself is made again when you remove it"
        )


GENERATION = "generation_config.json"
"""File with the ends of answers, and with defaults of sampling, which asyncrl does not read."""
OBJECTS = ("config.json", GENERATION, "tokenizer_config.json", "tokenizer.json", INDEX)
"""Files that hold one object of JSON."""
COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", *POSITIONS)
"""Keys of config.json that are whole numbers above 0 where they are there."""


def damages(folder: Path) -> Iterator[str]:
    """Yields one clause for each file that cannot be loaded."""
    for path in sorted(folder.glob("*.safetensors")):
        if not path.exists():
            yield f"{path} is a link to {path.readlink()}, which is gone or not seen from this machine"
    for path in sorted(folder.glob("*.json")):
        try:
            found = json.loads(path.read_bytes())
        except ValueError:
            yield f"{path} is cut short or damaged: it is not JSON"
            continue
        if path.name in OBJECTS and not isinstance(found, dict):
            yield f"{path} is damaged: it holds {json.dumps(found)[:40]}, and no object"
        elif path.name == "config.json" and (wrong := _wrong_counts(found)):
            yield f"{path} is damaged: {wrong}"
    for path in sorted(folder.glob("*.jinja")):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            yield f"{path} is damaged: it is no UTF-8 text"
    for name in weight_files(folder):
        path = folder / name
        try:
            with safe_open(path, framework="np"):
                pass
        except FileNotFoundError:
            yield f"{path} is missing, and {INDEX} names it"
        except SafetensorError as error:
            yield f"{path} is cut short or damaged: it has {path.stat().st_size} bytes. {error}"


def _wrong_counts(shape: Mapping[str, Any]) -> str:
    """Returns which sizes in the contents of config.json cannot be; "" where all can."""
    shape = shape.get("text_config") or shape
    for name in COUNTS:
        value = shape.get(name)
        if value is not None and not (isinstance(value, int) and value > 0):
            return f"{name} is {json.dumps(value)}, and not a number from 1"
    hidden = shape.get("hidden_size")
    heads = shape.get("num_attention_heads")
    if hidden and heads and not shape.get("head_dim") and hidden % heads:
        return f"hidden_size = {hidden} is no multiple of num_attention_heads = {heads}"
    return ""


def weight_files(folder: Path) -> list[str]:
    """Returns the names of the weight files that transformers loads; a damaged index names none."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    with suppress(OSError, ValueError, AttributeError):
        return sorted(set(json.loads((folder / INDEX).read_bytes()).get("weight_map", {}).values()))
    return []


def vocabulary(folder: Path, *, added: bool = True) -> dict[int, str]:
    """Returns the tokens by id from tokenizer.json, or nothing where that file does not list them. added: with those
    that were added to the vocabulary, such as special ones."""
    try:
        described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        known = described["model"]["vocab"]
        by_token = known.items() if isinstance(known, dict) else ((entry[0], i) for i, entry in enumerate(known))
        more = described.get("added_tokens") or () if added else ()
        return {int(number): str(token) for token, number in by_token} | {
            int(each["id"]): str(each["content"]) for each in more
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}


def chat_template_of(folder: Path) -> str | None:
    """Returns the chat template of a model folder, if it has one."""
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    described = folder / "tokenizer_config.json"
    found = json.loads(described.read_text(encoding="utf-8")).get("chat_template") if described.is_file() else None
    return found if isinstance(found, str) else None


def has_chat_template(folder: Path) -> bool:
    """Returns whether the tokenizer in a model folder has a chat template, in any form."""
    described = folder / "tokenizer_config.json"
    in_config = described.is_file() and bool(json.loads(described.read_bytes()).get("chat_template"))
    files = [*folder.glob("chat_template*"), *folder.glob("additional_chat_templates/*")]
    return in_config or any(path.stat().st_size for path in files)


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
    tokens = config.task.max_prompt_tokens + config.response_tokens
    return tokens if context is None else min(tokens, context)


def context_of_folder(folder: Path) -> int | None:
    """Returns the context length of a model folder, or None for a folder without config.json, of other services."""
    path = folder / "config.json"
    return context_of(json.loads(path.read_text())) if path.exists() else None


# A digest of the weights of a model folder, by which a run with adapters knows its base model. Without torch.


BASE = "base_model.json"
"""File of a checkpoint with adapters: where their base model was, and the digest of its weights."""


def weights_digest(folder: Path) -> str:
    """Returns the digest of names, types, shapes and bytes of all tensors, however they are spread over files."""
    names = weight_files(folder)
    lines = [line for name in names for line in _tensors(folder / name)]
    if not names:  # Files of torch, which have no header that could be read here.
        lines = [f"{path.name} {_digest(path, 0, None)}" for path in folder.glob("pytorch_model*.bin")]
    return xxh3_128_hexdigest("\n".join(sorted(lines)).encode())


def write_base(checkpoint: Path, folder: Path, digest: str) -> None:
    """Writes the base model of the adapters of a checkpoint."""
    (checkpoint / BASE).write_text(json.dumps({"folder": str(folder), "digest": digest}) + "\n")


def refuse_other_base(checkpoint: Path, folder: Path) -> None:
    """Raises ConfigError when the model in `folder` is not the base model of the adapters in a checkpoint."""
    path = checkpoint / BASE
    if not path.exists():  # Nothing is known of its base model.
        return
    wanted = json.loads(path.read_text())["digest"]
    found = weights_digest(folder)
    if found != wanted:
        raise ConfigError(
            f"model.name: {folder} holds another model than the one on which the adapters in {checkpoint} were trained "
            f"(its weights have digest {found}, theirs had {wanted}): put back the model that the run began with"
        )


def _tensors(path: Path) -> Iterator[str]:
    """Yields name, type, shape and digest of each tensor of a safetensors file."""
    with path.open("rb") as file:
        begin = 8 + (length := int.from_bytes(file.read(8), "little"))
        header = json.loads(file.read(length))
    for name, each in header.items():
        if name != "__metadata__":
            first, last = (begin + offset for offset in each["data_offsets"])
            yield f"{name} {each['dtype']} {each['shape']} {_digest(path, first, last)}"


def _digest(path: Path, first: int, last: int | None) -> str:
    return xxh3_128_hexdigest(np.memmap(path, np.uint8, "r")[first:last].data)
