"""Loading models, one at a time in a process: transformers patches global state of torch while it does."""

import threading
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from asyncrl.model_files import refuse_damaged

_one_at_a_time = threading.Lock()


def load_pretrained(folder: Path, **options: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained`, safe in several threads (services inside one process).

    The weights lie in memory of their own. As transformers leaves them they are pages of the file: when that is cut
    short, they are gone, those that were changed since too, and who reads them is killed by SIGBUS.

    Raises:
        ConfigError: files of it are not whole.
    """
    refuse_damaged(folder)
    with _one_at_a_time:
        return _in_memory(AutoModelForCausalLM.from_pretrained(folder, **options))


@torch.no_grad()
def _in_memory(model: Any) -> Any:
    for tensor in chain(model.parameters(), model.buffers()):
        tensor.data = tensor.data.clone()
    return model
