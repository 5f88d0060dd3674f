from typing import Any

import pytest

from asyncrl.config.schema import Config


def test_vllm_takes_weights_from_shared_memory_only() -> None:
    plain: dict[str, Any] = {"model": {"name": "m"}, "task": {"prompts": "p"}, "generation": {"engine": "vllm"}}
    for transport in ("auto", "shm"):
        Config.model_validate(plain | {"weights": {"transport": transport}})
    for transport in ("tcp", "file"):
        with pytest.raises(ValueError, match="shared memory of its host"):
            Config.model_validate(plain | {"weights": {"transport": transport}})


def warned(weights: dict[str, str], dtype: str = "float32") -> list[str]:
    plain: dict[str, Any] = {"model": {"name": "m", "dtype": dtype}, "task": {"prompts": "p"}, "weights": weights}
    return [problem.key for problem in Config.model_validate(plain).warnings if problem.key.startswith("weights.")]


@pytest.mark.parametrize(
    ("weights", "dtype", "keys"),
    [
        ({}, "float32", []),
        ({"codec": "sparse"}, "bfloat16", []),
        ({"transport": "tcp", "codec": "float16"}, "float32", []),
        ({"transport": "file", "folder": "/shared"}, "float32", []),
        ({"transport": "shm", "codec": "sparse"}, "float32", ["weights.codec"]),
        ({"transport": "file", "codec": "fp8"}, "float32", ["weights.codec"]),
        ({"transport": "tcp", "codec": "bfloat16"}, "bfloat16", ["weights.codec"]),
        ({"transport": "tcp", "folder": "/shared"}, "float32", ["weights.folder"]),
    ],
)
def test_values_that_nothing_reads_are_warned_about(weights: dict[str, str], dtype: str, keys: list[str]) -> None:
    assert warned(weights, dtype) == keys
