"""The host side of the measurements of a GPU, with the CPU as the device and twins of CUDA and NCCL."""

import asyncio
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.bench.gpu import benchmark, nccl_ranks, shared_memory
from asyncrl.bench.gpu.bench_device import BenchDevice, HostTimer, NotMeasured, Results
from asyncrl.bench.gpu.benchmark import MEASUREMENTS, NOTHING_TO_RUN, main, measure, write
from asyncrl.bench.gpu.language_model import medians, sample, update_phases, vllm_pause
from asyncrl.lanes.weights.transports.communicator import RECEIVER, TRAINER
from asyncrl.lanes.weights.transports.nccl import NcclBackend
from tests.unit.lanes.weights.transports.cuda_twin import TwinCuda
from tests.unit.lanes.weights.transports.faults import TwinNccl

SMALL = 1 << 20
OF_OTHER_PROCESSES = ("2 ", "7 ")
LEFT_OUT = "5 pause of vLLM"


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
    meeting = backend.invite()
    found = dict[int, Results]()

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


# The host side of measuring vLLM's pause: the order of calls, the phases, and what is said without vLLM.
FIELDS = [1, 7, "shm://arena", 1, "", ""]
GPU_PHASES = ["attach_ms", "pause_ms", "start_ms", "update_ms", "finish_ms", "resume_ms", "first_token_ms"]
CPU_PHASES = ["attach_ms", "pause_ms", "load_ms", "resume_ms", "first_token_ms"]


class Engine:
    """Answers as EngineProcess does, and samples a token when it is resumed."""

    def __init__(self, refuses: str = "") -> None:
        self.calls = list[Any]()
        self.sampled = asyncio.Event()
        self._refuses = refuses

    async def pause(self) -> None:
        self.sampled.set()  # The last token before the pause is not that of the new version.
        self.calls.append("pause")

    async def resume(self) -> None:
        assert not self.sampled.is_set()
        self.calls.append("resume")
        self.sampled.set()

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        self.calls.append((method, *arguments))
        return [self._refuses] if method == "asyncrl_attach" else [None]


@pytest.mark.parametrize(("device", "phases"), [("cuda", GPU_PHASES), ("cpu", CPU_PHASES)])
async def test_a_version_is_measured_by_phase_in_the_order_of_the_engine(device: str, phases: list[str]) -> None:
    engine = Engine()
    found = await update_phases(engine, ["folder", "bfloat16", None], FIELDS, device, engine.sampled)
    assert list(found) == [*phases, "without_tokens_ms"]
    assert found["without_tokens_ms"] == pytest.approx(sum(found[name] for name in phases[1:]))
    loads: list[Any] = [("asyncrl_load", 7)]
    if device == "cuda":
        loads = [("start_weight_update",), ("update_weights", {"version": 7}), ("finish_weight_update",)]
    attach = ("asyncrl_attach", ["folder", "bfloat16", None], FIELDS)
    assert engine.calls == [attach, "pause", *loads, "resume"]


async def test_weights_that_vllm_refuses_are_no_result() -> None:
    engine = Engine(refuses="WeightsError: damaged")
    with pytest.raises(NotMeasured, match="damaged"):
        await update_phases(engine, ["folder", "bfloat16", None], FIELDS, "cuda", engine.sampled)
    assert len(engine.calls) == 1


async def test_every_token_is_noted() -> None:
    async def stream() -> Any:
        yield 5, -1.0

    sampled = asyncio.Event()
    await sample(stream(), sampled)
    assert sampled.is_set()


def test_the_median_of_each_phase_counts() -> None:
    assert medians([{"a_ms": value, "b_ms": 2.0} for value in (1.0, 9.0, 3.0)]) == {"a_ms": 3.0, "b_ms": 2.0}


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_says_so() -> None:
    with pytest.raises(NotMeasured, match="vLLM is not installed"):
        vllm_pause(BenchDevice("cpu", HostTimer(), TwinCuda(), 1 << 20))
