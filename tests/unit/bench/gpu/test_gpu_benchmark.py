"""The host side of the measurements of a GPU, with the CPU as the device and twins of CUDA and NCCL."""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from asyncrl.bench.gpu import benchmark, nccl_ranks, shared_memory
from asyncrl.bench.gpu.bench_device import BenchDevice, HostTimer, NotMeasured, Results
from asyncrl.bench.gpu.benchmark import MEASUREMENTS, NOTHING_TO_RUN, main, measure, write
from asyncrl.lanes.weights.transports.collective.communicator import RECEIVER, TRAINER
from asyncrl.lanes.weights.transports.collective.nccl import NcclBackend
from tests.unit.lanes.weights.transports.cuda_twin import TwinCuda
from tests.unit.lanes.weights.transports.faults import TwinNccl

SMALL = 1 << 20
OF_OTHER_PROCESSES = ("2 ", "7 ", "4 copies of another process")
LEFT_OUT = ("11 ", "12 ", "5 pause of vLLM")


@pytest.fixture
def bench() -> Iterator[BenchDevice]:
    cuda = TwinCuda()
    yield BenchDevice("cpu", HostTimer(), cuda, SMALL)
    cuda.end()


@pytest.mark.parametrize("name", [name for name in MEASUREMENTS if not name.startswith(OF_OTHER_PROCESSES)])
def test_each_measurement_gives_values_or_says_why_not(
    bench: BenchDevice, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "MEASUREMENTS", {name: MEASUREMENTS[name]})
    values = measure(bench, [name.partition(" ")[0]])[name]
    if name.startswith(LEFT_OUT):
        assert str(values).startswith("not measured: ")
        return
    assert isinstance(values, dict), values
    assert values
    assert all(value >= 0 for value in values.values())


def test_there_are_fourteen() -> None:
    numbers = list(dict.fromkeys(name.split()[0] for name in MEASUREMENTS))
    assert numbers == [str(number) for number in range(1, 15)]


def test_memory_of_another_process_is_opened_and_copied(bench: BenchDevice) -> None:
    arena, small = shared_memory.export(bench.cuda, SMALL, 5)
    other = BenchDevice("cpu", HostTimer(), TwinCuda(), SMALL)
    found = shared_memory.opened(other, arena, small)
    assert {"open_one_ms", "open_5_ms"} < set(found)
    assert sum("shared_over_own" in name for name in found) == len(bench.sizes)


def test_a_process_that_fails_is_told(bench: BenchDevice) -> None:
    with pytest.raises(NotMeasured, match="failed"):
        shared_memory.cuda_ipc(bench)  # Without CuPy, or without a driver.


def test_two_ranks_measure_and_give_up_a_peer_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ranks, "HANG", 0.05)
    backend = NcclBackend(TwinNccl())
    meeting, found = backend.invite(), dict[int, Results]()

    def run(number: int) -> None:
        found[number] = nccl_ranks.rank(backend, meeting, number, (4096, 8192))

    ranks = [threading.Thread(target=run, args=(number,)) for number in (TRAINER, RECEIVER)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(30.0)
    assert set(found[TRAINER]) == {"pair_4_KiB_GB_s", "pair_8_KiB_GB_s", "abort_ms"}
    assert found[RECEIVER] == {}


def test_a_failure_is_a_result(bench: BenchDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: BenchDevice) -> Results:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(benchmark, "MEASUREMENTS", {"1 a": broken, "2 b": lambda bench: {"x": 1.0}})
    assert measure(bench) == {"1 a": "failed: RuntimeError: CUDA error: an illegal memory access", "2 b": {"x": 1.0}}


def test_results_are_written_with_device_and_date(tmp_path: Path) -> None:
    path = write({"1 a": {"x": 1.0}}, "NVIDIA H200 (141 GB)", tmp_path, datetime(2026, 11, 25, 10, 30, tzinfo=UTC))
    assert path.name == "gpu-nvidia-h200-141-gb-2026-11-25.json"
    written = json.loads(path.read_text())
    assert written["date"] == "2026-11-25T10:30Z"
    assert written["measurements"] == {"1 a": {"x": 1.0}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == NOTHING_TO_RUN
    assert "no CUDA device" in capsys.readouterr().out
