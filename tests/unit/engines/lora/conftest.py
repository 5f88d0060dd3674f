"""The tiny models and requests of the engine's tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import Config
from tests.unit.engines.generation.conftest import model_folder as model_folder
from tests.unit.engines.generation.conftest import requests as requests

LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("llama")


@pytest.fixture
def config() -> Callable[..., Config]:
    """config(lora={...}, algorithm={...}, ...) -> Config with adapters and a learning rate that shows."""

    def make(lora: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
        found: dict[str, Any] = {
            "task": {"prompts": "none", "max_prompt_tokens": 40},
            "generation": {"slots": 5, "max_new_tokens": 24},
            "steps": 10,
            **sections,
        }
        found["training"] = {"learning_rate": 1e-2, **found.get("training", {})}
        found["model"] = {"name": "tiny", "lora": LORA | (lora or {}), **found.get("model", {})}
        return Config.model_validate(found)

    return make
