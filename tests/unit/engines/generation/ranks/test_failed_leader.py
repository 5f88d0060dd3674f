"""A rank that leads, and fails: the others may wait in an exchange, so that it leads no more, and its worker ends."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from asyncrl.engines.generation.engine_interface import SampleRequest
from asyncrl.engines.generation.ranked_generation import Call, LeadingEngine
from asyncrl.engines.generation.torch_generation import TorchGeneration
from asyncrl.engines.ranks.rank_mesh import RankMesh, Ranks
from asyncrl.errors import PeerLost, WeightsError
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from tests.unit.engines.generation.conftest import engine_config, make_model
from tests.unit.services.conftest import worker_context as worker_context

LIMIT = 60.0
PROMPT = np.arange(5, 20).astype(np.int32)


class LoneLeader(Ranks):
    """Counts exchanges with a rank that is not there."""

    size = 2

    def __init__(self) -> None:
        self.exchanges = 0

    def sum(self, values: Tensor) -> Tensor:
        self.exchanges += 1
        return values

    def shared(self, values: Tensor, source: int) -> Tensor:
        self.exchanges += 1
        return values


def requests() -> list[SampleRequest]:
    return [SampleRequest((0, member, 0), PROMPT, member, 1.0, 8) for member in range(2)]


def runs_out_of_memory(*args: object) -> NoReturn:
    raise MemoryError("the device is full")


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with capture_logs() as captured:
        yield captured


@pytest.mark.parametrize("call", ["logprobs_after", "step"])
async def test_a_leader_that_failed_in_a_call_tells_no_other_and_ends(
    tmp_path: Path, worker_context: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, lines: list[Any], call: str
) -> None:
    torch.set_num_threads(1)
    config = engine_config(slots=4, max_prompt_tokens=40, max_new_tokens=8)
    own = LoneLeader()
    told = list[Call]()
    changes = {"model_dir": make_model("llama", tmp_path), "make_compute": ThreadCompute}
    opened = partial(LeadingEngine, ranks=RankMesh(everyone=own, tensor=own), tell=told.append)
    async with asyncio.timeout(LIMIT), asyncio.TaskGroup() as tasks:
        worker = worker_context("generation", config, tasks, options={"own_version": 0}, **changes)
        leader = await TorchGeneration.open(worker, copies=False, engine=opened)
        running = asyncio.ensure_future(leader.run(lambda done: None))
        await leader.pause()
        await leader.submit(requests())
        with pytest.raises(WeightsError):  # It is raised before anything has changed, and no rank is told.
            await worker.compute.run(partial(leader.core.load, {}, 1, share=True))
        if call == "logprobs_after":
            monkeypatch.setattr(leader.core._flat, "logits_after", runs_out_of_memory)
            with pytest.raises(PeerLost, match="MemoryError"):
                await leader.logprobs_after(PROMPT)
        else:
            monkeypatch.setattr(leader.core._flat, "logits", runs_out_of_memory)
            await leader.resume()
        with pytest.raises(PeerLost, match="tells no further call: MemoryError") as failed:
            await running
        assert isinstance(failed.value.__cause__, MemoryError)
        exchanges = own.exchanges
        for ask in (partial(leader.logprobs_after, PROMPT), partial(leader.submit, requests()), leader.put_away):
            with pytest.raises(PeerLost, match="tells no further call: MemoryError"):
                await ask()
        with pytest.raises(PeerLost):
            await worker.compute.run(leader.core.step)
        worker.compute.close()
    assert [name for name, *_ in told] == ["submit", call]
    assert own.exchanges == exchanges
    assert [line["error"] for line in lines if line["log_level"] == "error"] == [str(failed.value)]
