from typing import Any

import pytest

from asyncrl.config.schema import Config
from tests import golden


def test_vllm_takes_weights_from_shared_memory_only() -> None:
    plain: dict[str, Any] = {"model": {"name": "m"}, "task": {"prompts": "p"}, "generation": {"engine": "vllm"}}
    for transport in ("auto", "shm"):
        Config.model_validate(plain | {"weights": {"transport": transport}})
    for transport in ("tcp", "file", "gloo", "nccl", "cuda_ipc"):
        with golden.raises(ValueError):
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


@pytest.mark.parametrize(
    ("transport", "training", "generation", "refused"),
    [
        ("nccl", "cpu", "cuda", 'between GPUs, but training is on cpu, generation on cuda:0: write "auto"'),
        ("cuda_ipc", "cpu", "cpu", 'between GPUs, .*"gloo"'),
        ("nccl", "cuda", "cuda:0", 'one GPU for each of its ranks: write "cuda_ipc"'),
        ("cuda_ipc", "cuda:0", "cuda:1", 'memory of one GPU: write "nccl"'),
        ("gloo", "cpu", "cuda", 'between CPUs, .*"auto"'),
        ("nccl", "cuda:0", "cuda:1", None),
        ("cuda_ipc", "cuda", "cuda:0", None),
        ("gloo", "cpu", "cpu", None),
    ],
)
def test_a_transport_that_the_devices_do_not_allow_is_refused(
    transport: str, training: str, generation: str, refused: str | None
) -> None:
    sections: dict[str, Any] = {
        "model": {"name": "m"},
        "task": {"prompts": "p"},
        "training": {"device": training},
        "generation": {"device": generation},
        "weights": {"transport": transport},
    }
    if refused is None:
        Config.model_validate(sections)
        return
    with pytest.raises(ValueError, match=refused):
        Config.model_validate(sections)


def test_one_process_cannot_share_cuda_memory_with_itself() -> None:
    devices = {"training": {"device": "cuda"}, "generation": {"device": "cuda"}}
    plain: dict[str, Any] = {"model": {"name": "m"}, "task": {"prompts": "p"}, "weights": {"transport": "cuda_ipc"}}
    with pytest.raises(ValueError, match="of its own"):
        Config.model_validate(plain | devices | {"fleet": {"wire": "inproc"}})
