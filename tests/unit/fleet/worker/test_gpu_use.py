"""A worker reports the memory of its GPU; a stand-in for torch answers the calls of the device."""

import sys
from types import SimpleNamespace

import pytest

from asyncrl.fleet.worker.process_memory import gpu_use


class Cuda:
    """A GPU of 100 bytes of which 30 are free."""

    def __init__(self, *, initialized: bool = True, broken: bool = False) -> None:
        self.initialized = initialized
        self.broken = broken
        self.asked: list[str] = []

    def is_initialized(self) -> bool:
        return self.initialized

    def mem_get_info(self, device: str) -> tuple[int, int]:
        self.asked.append(device)
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return 30, 100

    def memory_reserved(self, device: str) -> int:
        return 20


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=made))
    return made


def test_a_worker_on_a_gpu_reports_the_memory_of_the_device_and_its_own(cuda: Cuda) -> None:
    assert gpu_use("cuda:1") == {"memory": 70.0, "total": 100.0, "own": 20.0}
    assert cuda.asked == ["cuda:1"]


def test_a_worker_on_a_cpu_and_one_that_has_not_begun_ask_no_device(cuda: Cuda) -> None:
    assert gpu_use("cpu") == {}
    cuda.initialized = False
    assert gpu_use("cuda:0") == {}
    assert cuda.asked == []


def test_a_gpu_in_error_leaves_the_rest_of_a_report(cuda: Cuda) -> None:
    cuda.broken = True
    assert gpu_use("cuda:0") == {}


def test_a_process_without_torch_does_not_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert gpu_use("cuda:0") == {}
    assert "torch" not in sys.modules
