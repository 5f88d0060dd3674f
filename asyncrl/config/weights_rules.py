"""Rules about the section `[weights]`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config.problems import Problem

if TYPE_CHECKING:
    from asyncrl.config.schema import Config


def weights_problems(config: "Config") -> Iterator[Problem]:
    """Yields what is wrong with the section, and warnings about values that nothing reads."""
    section = config.weights
    if config.generation.engine == "vllm" and section.transport in ("tcp", "file"):
        text = 'vLLM reads new weights from the shared memory of its host: write "auto" or "shm"'
        yield Problem("weights.transport", "", text, ("generation.engine",))
    if section.codec != "dense" and section.transport in ("shm", "file"):
        text = 'only weights that cross a network are encoded: remove it, or write weights.transport = "tcp"'
        yield Problem("weights.codec", "", text, ("weights.transport",), is_warning=True)
    if section.codec in ("bfloat16", "float16") and config.model.dtype == "bfloat16":
        text = "weights of bfloat16 have as few bytes already: remove it"
        yield Problem("weights.codec", "", text, ("model.dtype",), is_warning=True)
    if section.folder and section.transport != "file":
        text = 'nothing reads it: remove it, or write weights.transport = "file"'
        yield Problem("weights.folder", "", text, ("weights.transport",), is_warning=True)
