"""The host side of measuring vLLM's pause: the order of calls, the phases, and what is said without vLLM."""

import asyncio
from importlib.util import find_spec
from typing import Any

import pytest

from asyncrl.bench.gpu.bench_device import BenchDevice, HostTimer, NotMeasured
from asyncrl.bench.gpu.vllm_updates import medians, sample, update_phases, vllm_pause
from tests.unit.lanes.weights.transports.cuda_twin import TwinCuda

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
