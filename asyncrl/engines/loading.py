"""Loading models, one at a time in a process: transformers patches global state of torch while it does."""

import threading
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

_one_at_a_time = threading.Lock()


def load_pretrained(folder: Path, **options: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained`, safe in several threads (services inside one process)."""
    with _one_at_a_time:
        return AutoModelForCausalLM.from_pretrained(folder, **options)
