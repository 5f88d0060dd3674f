"""Memory of a process: what the GPU holds, and what garbage collection leaves alone."""

import gc
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from asyncrl.fleet.worker.process_memory import YOUNG_OF_CALLER, gc_frozen, gpu_use


class Node:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def frozen_again() -> Iterator[None]:
    """What the session has frozen is thawed with the rest; without this later tests would collect it."""
    yield
    gc.freeze()


def test_what_survives_a_step_is_collected_no_more_and_young_garbage_is_freed_before() -> None:
    with gc_frozen() as frozen:
        in_flight = [[0]]
        gone = weakref.ref(Node())
        assert any(each is in_flight for each in gc.get_objects())
        frozen.add_survivors()
        assert not any(each is in_flight for each in gc.get_objects())
        assert gone() is None


def test_a_cycle_of_frozen_objects_is_freed_when_the_process_holds_twice_as_much() -> None:
    with gc_frozen() as frozen:
        node = Node()
        frozen.add_survivors()
        gone = weakref.ref(node)
        del node
        frozen.add_survivors()
        assert gone() is not None, "frozen"
        frozen.most_blocks = sys.getallocatedblocks() + 10_000  # Twice as many would take seconds to make.
        more = [float(number) for number in range(20_000)]
        frozen.add_survivors()
        assert gone() is None
        assert frozen.most_blocks == pytest.approx(2 * sys.getallocatedblocks(), rel=0.1)
        assert len(more) == 20_000


@pytest.mark.parametrize(("before", "inside"), [(700, YOUNG_OF_CALLER), (10**6, 10**6)])
def test_many_waiting_calls_are_not_looked_at_again_and_again(before: int, inside: int) -> None:
    own = gc.get_threshold()
    gc.set_threshold(before, 10, 10)
    try:
        with gc_frozen(YOUNG_OF_CALLER):
            began = gc.get_stats()[0]["collections"]
            waiting = [[number] for number in range(YOUNG_OF_CALLER // 2)]
            assert gc.get_stats()[0]["collections"] == began
            assert gc.get_threshold() == (inside, 10, 10)
        assert len(waiting) == YOUNG_OF_CALLER // 2
        assert gc.get_threshold() == (before, 10, 10)
    finally:
        gc.set_threshold(*own)


# ---- a worker reports the memory of its GPU; a stand-in for torch answers the calls of the device ------------------


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
