"""Loading models, one at a time in a process: transformers patches global state of torch while it does."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from asyncrl.errors import ConfigError
from asyncrl.model_files import HEADS, refuse_damaged

_one_at_a_time = threading.Lock()


@contextmanager
def _alone_and_silent() -> Iterator[None]:
    """What transformers says of a head without weights, that it should be trained, is what becomes of it here."""
    with _one_at_a_time:
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


def load_pretrained(folder: Path, **options: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained`, safe in several threads (services inside one process).

    The weights lie in memory of their own. As transformers leaves them they are pages of the file: when that is cut
    short, they are gone, those that were changed since too, and who reads them is killed by SIGBUS.

    Raises:
        ConfigError: files of it are not whole.
    """
    refuse_damaged(folder)
    with _alone_and_silent():
        return _in_memory(AutoModelForCausalLM.from_pretrained(folder, **options))


def load_pretrained_classifier(folder: Path, kind: Any, role: str, **options: Any) -> tuple[Any, list[str]]:
    """The same for an automatic class of classifiers, and which parameters of its head are missing in the folder.

    role: what the model is to be, for messages.

    Raises:
        ConfigError: files are not whole, transformers has no such model, its head has other labels, or more than the
            head is missing.
    """
    refuse_damaged(folder)
    try:
        with _alone_and_silent():
            model, told = kind.from_pretrained(folder, output_loading_info=True, **options)
            _in_memory(model)
    except ValueError as error:
        raise ConfigError(f"model {folder} cannot be a {role}: {error}") from error
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise ConfigError(f"model {folder} cannot be a {role}: its head has another number of labels than 1") from error
    missing = sorted(told["missing_keys"])
    if strange := [name for name in missing if name.split(".")[0] not in HEADS]:
        raise ConfigError(f"model {folder} cannot be a {role}: it has no weights {', '.join(strange[:3])}")
    return model, missing


@torch.no_grad()
def _in_memory(model: Any) -> Any:
    for tensor in chain(model.parameters(), model.buffers()):
        tensor.data = tensor.data.clone()
    return model
