"""A model that is loaded needs its file no more."""

from collections.abc import Callable
from pathlib import Path

from asyncrl.engines.loading import load_pretrained


def test_weights_lie_in_memory_of_their_own(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama")
    (file,) = folder.glob("*.safetensors")
    model = load_pretrained(folder)
    assert str(file) not in Path("/proc/self/maps").read_text()
    assert model.get_input_embeddings().weight.requires_grad
