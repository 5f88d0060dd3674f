"""Loads models with transformers: one at a time per process, quietly, and into private memory, because every process
that reads weights mapped from a file is killed by SIGBUS when the file is truncated later."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
from transformers.utils import logging

from asyncrl.engines.models.model_folder import GENERATION, refuse_damaged
from asyncrl.engines.models.scoring_models import HEADS
from asyncrl.engines.pictures.prompt_pictures import WITH_PICTURES
from asyncrl.errors import ConfigError

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
