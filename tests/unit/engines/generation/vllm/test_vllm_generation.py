"""The queue, ends and versions of the `vllm` engine, with a stand-in for vLLM's processes that samples known tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from asyncrl.engines.generation.engine_interface import NO_WEIGHTS, Completion, SampleRequest
from asyncrl.engines.generation.vllm.vllm_generation import VllmGeneration, sampling_seed
from asyncrl.errors import ConfigError, PeerLost, WeightsError
from asyncrl.protocols.messages import Published
from tests.unit.engines.generation.conftest import engine_config
from tests.unit.services.conftest import worker_context as worker_context

END = 3  # the model's <|im_end|>
LIMIT = 20.0


class StandIn:
    """Samples the tokens 10, 11, 12 ... of each request, one at each turn of the loop; `then` is sampled at the end.
    Each token's log-prob is minus the number of loads before it. fails: calls of workers that raise PeerLost; refuses:
    what attaching is answered with."""

    def __init__(self) -> None:
        self.sampled, self.counters = 0, SimpleNamespace(cache_used=0.5, preemptions=2)
        self.open, self.closed, self.calls = list[str](), list[str](), list[str]()
        self.settings: dict[str, Any] = {}
        self.salts = list[str]()
        self.ends: dict[int, int] = {}  # A request of this length of prompt samples END as its token of this number.
        self.fails = ""
        self.refuses = ""
        self.loads = 0
        self.dead = False
        self.died = asyncio.Event()
        self._steps = asyncio.Event()
        self._steps.set()

    async def tokens(self, name: str, prompt: Any, salt: str, **settings: Any) -> AsyncIterator[tuple[int, float]]:
        self.settings = settings
        self.salts = [*self.salts, salt]
        self.open.append(name)
        try:
            for number in range(settings["max_tokens"] + 3):
                await asyncio.sleep(0)
                await self._steps.wait()
                if self.dead:
                    raise PeerLost("vLLM's processes have ended")
                self.sampled += 1
                yield (END if self.ends.get(len(prompt)) == number else 10 + number), -float(self.loads)
        finally:
            self.open.remove(name)
            self.closed.append(name)

    async def pause(self) -> None:
        self.calls.append("pause")
        self._steps.clear()

    async def resume(self) -> None:
        self.calls.append("resume")
        self._steps.set()

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        self.calls.append(method)
        for _ in range(5):  # Everything else goes on meanwhile.
            await asyncio.sleep(0)
        if method == self.fails:
            raise PeerLost(f"{method} failed")
        self.loads += method in ("asyncrl_load", "finish_weight_update")
        return [self.refuses] if method == "asyncrl_attach" else [None]

    async def watch(self) -> None:
        await self.died.wait()
        raise PeerLost("vLLM's processes have ended")

    async def drop_cache(self) -> None:
        self.calls.append("drop_cache")

    def close(self) -> None:
        self.calls.append("close")


class Played:
    def __init__(self, engine: VllmGeneration, process: StandIn, loop: "asyncio.Task[None]") -> None:
        self.engine = engine
        self.process = process
        self.loop = loop
        self.done: asyncio.Queue[Completion] = asyncio.Queue()

    async def sample(self, *requests: SampleRequest) -> list[Completion]:
        await self.engine.submit(requests)
        return [await self.done.get() for _ in requests]

    async def fails(self) -> list[BaseException]:
        """Waits for the end of `run`; returns what it raised."""
        await asyncio.wait([self.loop])
        error = self.loop.exception()
        assert isinstance(error, ExceptionGroup)
        return list(error.exceptions)


Start = Callable[..., Any]


@pytest.fixture
def start(model_folder: Callable[[str], Path], worker_context: Callable[..., Any]) -> Start:
    @asynccontextmanager
    async def started(version: int = 0, **settings: Any) -> AsyncIterator[Played]:
        folder = model_folder("llama")
        config = engine_config(**{"slots": 2, "max_prompt_tokens": 20, "max_new_tokens": 30} | settings)
        async with asyncio.timeout(LIMIT), asyncio.TaskGroup() as tasks:
            changes = {"model_dir": folder, "options": {"own_version": version}}
            worker = worker_context("generation", config, tasks, **changes)
            engine = VllmGeneration(worker, StandIn(), AutoTokenizer.from_pretrained(folder), {})  # type: ignore
            holder = list[Played]()
            loop = asyncio.ensure_future(engine.run(lambda done: [holder[0].done.put_nowait(each) for each in done]))
            holder.append(Played(engine, engine._engine, loop))
            yield holder[0]
            loop.cancel()
            await asyncio.wait([loop])

    return started


def asked(number: int, tokens: int = 6, **changes: Any) -> SampleRequest:
    prompt = np.arange(5, 8 + number, dtype=np.int32)
    return replace(SampleRequest((number, 0, 0), prompt, 77 + number, 1.0, tokens), **changes)


def published(version: int) -> Published:
    return Published(1, version, "shm://arena", version % 2, "abc")


async def turns_until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("a thousand turns of the loop were not enough")


async def test_a_sample_ends_where_the_torch_engine_would_end_it(start: Start) -> None:
    async with start(stop=["no such text"], top_p=0.9, top_k=7, min_p=0.1) as played:
        played.process.ends = {4: 2}
        found = {each.request.key[0]: each for each in await played.sample(asked(0), asked(1), asked(2, deadline=0.0))}
        assert (found[0].finish, found[0].tokens.tolist()) == ("length", [10, 11, 12, 13, 14, 15])
        assert (found[1].finish, found[1].tokens.tolist()) == ("stop", [10, 11, END])
        assert (found[2].finish, found[2].tokens.tolist()) == ("length", [10])
        assert len(played.process.closed) == 3
        assert not played.process.open
        assert played.process.settings["stop_token_ids"] == [2, END]
        assert [played.process.settings[bound] for bound in ("top_p", "top_k", "min_p")] == [0.9, 7, 0.1]


async def test_text_ends_before_a_stop_string(start: Start) -> None:
    """Token 10 of the byte tokenizer is one character, and so are the others."""
    async with start(stop=["()"]) as played:
        (found,) = await played.sample(asked(0, 20))
        assert found.finish == "stop_string"
        assert played.engine.tokenizer.decode(found.tokens) == found.text + "()"


async def test_requests_wait_for_slots_and_for_weights(start: Start) -> None:
    async with start(version=NO_WEIGHTS) as played:
        engine = played.engine
        process = played.process
        await engine.submit([asked(0, not_before=1), asked(1), asked(2), asked(3)])
        await asyncio.sleep(0)
        assert (engine.load().running, engine.load().waiting) == (0, 4)
        assert engine.load().cache_used == 0.0
        await engine.update(published(0))
        first = await played.done.get()
        assert first.request.key[0] == 1
        rest = {(await played.done.get()).request.key[0] for _ in range(2)}
        assert rest == {2, 3}
        assert (engine.load().running, engine.load().waiting) == (0, 1)
        await engine.update(published(1))
        last = await played.done.get()
        assert set(last.versions) == {1}
        assert process.salts == ["0", "0", "0", "1"]
        assert len(process.open) == 0


async def test_at_most_as_many_samples_run_as_there_are_slots(start: Start) -> None:
    async with start() as played:
        await played.engine.submit([asked(number) for number in range(6)])
        most = 0
        while played.done.qsize() < 6:
            await asyncio.sleep(0)
            most = max(most, len(played.process.open))
        assert most == 2
        assert played.engine.load().preemptions == 2


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_each_token_has_the_version_that_sampled_it(start: Start, kv: str) -> None:
    """The stand-in's log-probs count loads."""
    async with start(kv=kv) as played:
        await played.engine.submit([asked(0, 30)])
        await turns_until(lambda: played.process.sampled >= 5)
        await played.engine.update(published(1))
        found = await played.done.get()
        assert found.versions.tolist() == (-found.logprobs).astype(int).tolist()
        assert set(found.versions) == {0, 1}
        dropped = ["drop_cache"] if kv == "recompute" else []
        assert played.process.calls == ["asyncrl_attach", "pause", "asyncrl_load", *dropped, "resume"]


async def test_vllm_s_own_update_loads_weights_on_gpus(start: Start) -> None:
    async with start(device="cuda") as played:
        await played.engine.update(published(1))
        assert (await played.sample(asked(0)))[0].logprobs.tolist() == [-1.0] * 6
        loading = ["start_weight_update", "update_weights", "finish_weight_update"]
        assert played.process.calls == ["asyncrl_attach", "pause", *loading, "resume"]
        played.process.fails = "update_weights"
        with pytest.raises(PeerLost):
            await played.engine.update(published(2))
        assert isinstance((await played.fails())[0], WeightsError)


async def test_an_update_in_a_pause_leaves_it_paused(start: Start) -> None:
    async with start() as played:
        count = await played.engine.pause()
        await played.engine.submit([asked(0)])
        await played.engine.update(published(1))
        assert await played.engine.pause() == count
        assert played.process.calls == ["pause", "asyncrl_attach", "asyncrl_load"]
        played.engine.abort([(0, 0, 0)])
        await turns_until(lambda: not played.process.open)
        await played.engine.resume()
        assert [each.request.key[0] for each in await played.sample(asked(1))] == [1]
        assert played.done.empty()


async def test_requests_come_while_weights_are_loaded(start: Start) -> None:
    async with start() as played:
        updating = asyncio.ensure_future(played.engine.update(published(1)))
        await turns_until(lambda: "asyncrl_load" in played.process.calls)
        await played.engine.submit([asked(0), asked(1)])
        await updating
        assert {(await played.done.get()).request.key[0] for _ in range(2)} == {0, 1}


async def test_refused_weights_leave_the_old_ones_in_use(start: Start) -> None:
    async with start() as played:
        played.process.refuses = "WeightsError: the slot has another digest"
        with pytest.raises(WeightsError, match="another digest"):
            await played.engine.update(published(1))
        (found,) = await played.sample(asked(0))
        assert set(found.versions) == {0}
        assert played.process.calls == ["asyncrl_attach"]


async def test_weights_that_are_loaded_in_part_end_the_engine(start: Start) -> None:
    async with start() as played:
        played.process.fails = "asyncrl_load"
        with pytest.raises(PeerLost, match="asyncrl_load failed"):
            await played.engine.update(published(1))
        (error,) = await played.fails()
        assert isinstance(error, WeightsError)
        assert "version 1 in part" in str(error)
        assert played.process.calls[-1] == "asyncrl_load"


@pytest.mark.parametrize("is_idle", [False, True])
async def test_the_death_of_vllm_ends_the_engine(start: Start, is_idle: bool) -> None:
    async with start() as played:
        if is_idle:
            played.process.died.set()
        else:
            played.process.dead = True
            await played.engine.submit([asked(0)])
        (error,) = await played.fails()
        assert isinstance(error, PeerLost)


async def test_what_has_no_room_is_refused(start: Start) -> None:
    async with start() as played:
        with pytest.raises(ConfigError, match=r"generation\.max_new_tokens is 30"):
            await played.engine.submit([asked(0, 31)])


def test_a_later_turn_draws_other_numbers() -> None:
    first = asked(0)
    later = asked(0, drawn=4)
    assert sampling_seed(first) == first.seed
    assert sampling_seed(later) != sampling_seed(first)
    assert 0 <= sampling_seed(replace(later, seed=2**63 - 1)) < 2**63
