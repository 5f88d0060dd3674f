"""A model that is loaded needs its file no more."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.model_loading import load_pretrained
from asyncrl.errors import ConfigError


def test_weights_lie_in_memory_of_their_own(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama")
    (file,) = folder.glob("*.safetensors")
    model = load_pretrained(folder)
    assert str(file) not in Path("/proc/self/maps").read_text()
    assert model.get_input_embeddings().weight.requires_grad


def test_a_file_that_was_cut_short_is_named(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(model_folder("llama"), cut)
    os.truncate(cut / "model.safetensors", 1000)
    with pytest.raises(ConfigError, match=rf"^model\.name: {cut}/model\.safetensors is cut short.* Get it again"):
        load_pretrained(cut)


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "cuda:x", "meta", "mps", "CPU", "cpu:x", ""])
def test_a_device_that_torch_has_not_is_refused_by_its_key(device: str) -> None:
    with pytest.raises(ConfigError, match=rf'^training\.device = "{device}" cannot be used: \S.*"cpu"'):
        refuse_unusable("training.device", device)
    refuse_unusable("training.device", "cpu")
