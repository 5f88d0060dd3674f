"""The devices of these tests. Tests that take `device` run on the CPU too, where job unit runs them."""

import pytest
import torch

NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found
