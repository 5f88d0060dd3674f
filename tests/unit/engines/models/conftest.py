"""Tiny models, those of the engine's tests and one with eyes, and pictures for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.engines.generation.tokenization import TokenizerWithStops
from asyncrl.engines.models.prompt_pictures import PictureProcessor
from asyncrl.engines.models.warmed_up_model import build_picture_model, build_picture_tokenizer, save
from asyncrl.tasks.builtin.colours import DEMONSTRATIONS
from asyncrl.tasks.pictures import with_pictures_read
from tests.unit.engines.generation.conftest import changed_model as changed_model
from tests.unit.engines.generation.conftest import model_folder as model_folder

MOST_PIXELS = 4096


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Qwen2.5-VL, whose weights are large enough that pictures matter."""
    pytest.importorskip("PIL")
    found = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tokenizer = build_picture_tokenizer(DEMONSTRATIONS.words)
    model = build_picture_model(tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.dim() > 1 else None
    save(model, tokenizer, found)
    return found


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> TokenizerWithStops:
    from transformers import AutoTokenizer

    processor = PictureProcessor.of_folder(folder, MOST_PIXELS)
    return TokenizerWithStops(AutoTokenizer.from_pretrained(folder), (), pictures=processor)


@pytest.fixture(scope="session")
def png() -> Callable[..., bytes]:
    """Makes a PNG of noise."""
    from io import BytesIO

    from PIL import Image

    def make(width: int = 16, height: int = 16, seed: int = 0) -> bytes:
        noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
        file = BytesIO()
        Image.fromarray(noise).save(file, "PNG")
        return file.getvalue()

    return make


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Makes a prompt of texts and pictures."""
    folder = tmp_path_factory.mktemp("pictures")

    def make(*parts: str | bytes) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = []
        for number, part in enumerate(parts):
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                (folder / f"{number}.png").write_bytes(part)
                content.append({"type": "image", "image": str(folder / f"{number}.png")})
        found: list[dict[str, Any]] = with_pictures_read([{"role": "user", "content": content}])
        return found

    return make
