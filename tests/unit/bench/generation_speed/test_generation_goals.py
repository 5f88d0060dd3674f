"""The parts of `asyncrl-bench generation` that can be wrong without a number that looks wrong."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.bench.generation_speed import benchmark
from asyncrl.bench.generation_speed.benchmark import GROUPS, MEMBERS, prompts_of
from asyncrl.bench.generation_speed.long_prompt import PAGE, resident_bytes
from asyncrl.config.schema import Config


def test_memory_is_that_of_the_pages_that_were_written() -> None:
    pages = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    tensor = torch.from_numpy(np.frombuffer(pages, np.uint8))
    for page in (0, 7, 63):
        tensor[page * PAGE] = 1
    assert resident_bytes([tensor]) == 3 * PAGE


def test_members_have_one_prompt_only_on_the_side_that_shares_it() -> None:
    shared, apart = (prompts_of(shared=shared) for shared in (True, False))
    assert len({request.prompt.tobytes() for request in shared}) == GROUPS
    assert len({request.prompt.tobytes() for request in apart}) == GROUPS * MEMBERS


@pytest.mark.parametrize(("flags", "arguments"), [([], {}), (["--compiled"], {"enforce_eager": False})])
def test_vllm_compiles_the_model_only_where_it_is_asked_to(
    flags: list[str], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Config] = []

    class Started(Exception):
        pass

    def start(folder: Path, config: Config) -> None:
        seen.append(config)
        raise Started

    monkeypatch.setattr(benchmark, "find_spec", lambda name: "here")
    monkeypatch.setattr(benchmark, "VllmSide", start)
    with pytest.raises(Started):
        benchmark.main(["--engine", "vllm", *flags])
    assert [each.generation.vllm for each in seen] == [arguments]
