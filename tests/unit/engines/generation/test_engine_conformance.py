"""What the generation service relies on, of every engine behind GenerationEngine. That of vLLM takes part where vLLM is
installed (scripts/test vllm); its tests share one start, because that takes half a minute."""

import asyncio
import json
import os
import signal
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.engines.generation.engine_interface import Completion, GenerationEngine, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.generation.torch_generation import TorchGeneration
from asyncrl.engines.models.lora import adapted, attach, base_model, published_spec, published_tensors
from asyncrl.errors import PeerLost
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.lanes.weights.arena import open_reader, open_writer
from asyncrl.protocols.messages import Published
from tests.unit.engines.generation.conftest import engine_config, going_on, make_model, plain_logprobs
from tests.unit.services.conftest import worker_context as worker_context

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]  # vLLM's start is in the first test.
FAMILY = "llama-tied"
LIMIT = 60.0  # seconds of a whole test


class Played:
    """An engine under test, with the model folder and a trainer's arena."""

    def __init__(self, engine: GenerationEngine, model: Any, writer: Any) -> None:
        self.engine = engine
        self.model = model
        self.writer = writer
        self.done: asyncio.Queue[Completion] = asyncio.Queue()

    async def sample(self, *requests: SampleRequest) -> dict[int, Completion]:
        await self.engine.submit(requests)
        found = [await self.done.get() for _ in requests]
        return {completion.request.key[0]: completion for completion in found}

    def publish(self, version: int, *, change: Callable[[Any], None]) -> Published:
        with torch.no_grad():
            change(self.model)
        return self.writer.write(1, version, published_tensors(self.model))

    async def run(self, requests: Sequence[SampleRequest]) -> None:
        """Submits requests and waits until all have slots."""
        await self.engine.submit(requests)
        while self.engine.load().running < len(requests):
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)

    def check(self, *done: Completion) -> None:
        """Their log-probs are those of a forward of the newest published weights."""
        for each in done:
            np.testing.assert_allclose(each.logprobs, plain_logprobs(self.model, each), atol=1e-4, rtol=0)


Start = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(FAMILY, tmp_path_factory.mktemp("model"), head_dim=32)  # vLLM's smallest on CPUs


class TorchEngines:
    """Opens an engine for each test."""

    async def open(self, worker: Any) -> GenerationEngine:
        return await TorchGeneration.open(worker, copies=False)

    def close(self, engine: GenerationEngine) -> None:
        engine.close()

    async def kill_in_update(self, played: Played, published: Published) -> None:
        """Kills another process in which an engine has half loaded the version. This one then loads it whole."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            core = TorchEngine(Path(played.model.config.name_or_path), engine_config(**LONGEST))
            core._flat.weights_changed = lambda: (os.write(writing, b"half"), signal.pause())  # type: ignore
            core.load(open_reader(published, core.spec).tensors(published), 1, share=True)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, os.read, reading, 4)
        os.kill(child, signal.SIGKILL)
        await loop.run_in_executor(None, os.waitpid, child, 0)
        await played.engine.update(published)
        (found,) = (await played.sample(asked(1))).values()
        assert set(found.versions) == {1}
        played.check(found)


class VllmEngines:
    """Opens one vLLM for all tests. Each test has a queue, settings and weights of its own. processes: that share the
    model."""

    def __init__(self, folder: Path, processes: int) -> None:
        from asyncrl.engines.generation.vllm.option_problems import set_environment
        from asyncrl.engines.generation.vllm.vllm_generation import engine_arguments

        self.lost_in_update = False
        self.shape = json.loads((folder / "config.json").read_text())
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        config = engine_config(**LONGEST, layout_tp=processes)
        environment = dict(os.environ)
        set_environment(environment, config)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            for name, value in environment.items():
                patch.setenv(name, value)
            warnings.simplefilter("ignore")
            from asyncrl.engines.generation.vllm.engine_process import EngineProcess

            self.shared = EngineProcess(engine_arguments(config, folder, self.shape), range(261))

    async def open(self, worker: Any) -> GenerationEngine:
        from asyncrl.engines.generation.vllm.vllm_generation import VllmGeneration

        return VllmGeneration(worker, self.shared, self.tokenizer, self.shape)

    def close(self, engine: GenerationEngine) -> None:
        """Leaves vLLM running for the next test."""

    async def kill_in_update(self, played: Played, published: Published) -> None:
        """Kills vLLM while it loads the version. The engine is dead then, with all samples, and nobody waits for it."""
        process = self.shared._llm.engine_core.resources.engine_manager.processes[0]
        call_workers = self.shared.call_workers

        async def call_and_kill(method: str, *arguments: Any) -> list[Any]:
            if method == "asyncrl_load":
                os.kill(process.pid, signal.SIGSTOP)
                asyncio.get_running_loop().call_later(0.1, os.kill, process.pid, signal.SIGKILL)
            return await call_workers(method, *arguments)

        self.shared.call_workers = call_and_kill  # type: ignore
        try:
            await played.engine.update(published)
        except PeerLost:
            self.lost_in_update = True
        assert played.engine.version == 0


LONGEST = {"slots": 5, "max_prompt_tokens": 60, "max_new_tokens": 400}


OF_VLLM = find_spec("vllm") is not None
WHOLE = pytest.mark.parametrize("engines", ["torch", *(["vllm"] if OF_VLLM else [])], indirect=True, scope="module")
"""Of a test that says nothing else of processes that share a model: a start of two takes a minute."""


@pytest.fixture(scope="module", params=["torch", *(["vllm", "vllm-tp2"] if OF_VLLM else [])])
def engines(request: pytest.FixtureRequest, folder: Path) -> Iterator[TorchEngines | VllmEngines]:
    if request.param == "torch":
        yield TorchEngines()
        return
    vllm = VllmEngines(folder, 2 if request.param == "vllm-tp2" else 1)
    yield vllm
    vllm.shared.close()


@pytest_asyncio.fixture(loop_scope="module")
async def start(engines: Any, folder: Path, worker_context: Callable[..., Any]) -> Start:
    @asynccontextmanager
    async def started(version: int = 0, **settings: Any) -> AsyncIterator[Played]:
        config = engine_config(**LONGEST | settings)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if config.model.lora is not None:
            attach(model, config.model.lora, config.seed)
        writer = open_writer(f"asyncrl-{uuid4().hex[:8]}-weights", published_spec(model, "float32"), "ipc")
        with closing(writer):
            async with asyncio.timeout(LIMIT), asyncio.TaskGroup() as tasks:
                options = {"own_version": version}
                changes = {"model_dir": folder, "options": options, "make_compute": ThreadCompute}
                worker = worker_context("generation", config, tasks, **changes)
                played = Played(await engines.open(worker), model, writer)
                loop = tasks.create_task(
                    played.engine.run(lambda done: [played.done.put_nowait(each) for each in done])
                )
                await played.engine.update(played.publish(version, change=lambda _: None))
                yield played
                loop.cancel()
                await asyncio.wait([loop])
                engines.close(played.engine)
                worker.compute.close()

    return started


def asked(number: int, tokens: int = 20, **changes: Any) -> SampleRequest:
    random = np.random.default_rng(number)
    prompt = random.integers(5, 261, 4 + number).astype(np.int32)
    return replace(SampleRequest((number, 0, 0), prompt, 77 + number, 1.0, tokens), **changes)


def move(model: Any) -> None:
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter += 0.1 * parameter.std().nan_to_num(0.0) * torch.randn_like(parameter)


@pytest.mark.trap("raw_logprobs")
async def test_an_engine_samples_as_the_service_expects(start: Start) -> None:
    """Log-probs, seeds, limits, aborts, turns and updates, with one start of the engine."""
    async with start(slots=3, stop=["\ufffd"]) as played:
        engine = played.engine
        first = await played.sample(*(asked(number, temperature=0.8 + number / 10) for number in range(5)))
        played.check(*first.values())
        for completion in first.values():
            assert set(completion.versions) == {0}
            assert completion.tokens.max() < 261
            assert len(completion.tokens) <= 20
        again = await played.sample(asked(2, temperature=1.0))
        assert again[2].tokens.tolist() == first[2].tokens.tolist(), "a seed draws the same sample"
        assert {each.finish for each in first.values()} & {"stop_string", "stop"}
        await _ends_what_it_should(played)
        await _continues_turns(played, first[0])
        load = engine.load()
        assert (load.running, load.waiting) == (0, 0)
        assert 0.0 <= load.cache_used <= 1.0
        await _updates(played)


async def _ends_what_it_should(played: Played) -> None:
    """A deadline ends a sample after a token at least; an aborted one is never delivered, in a pause either."""
    late = await played.sample(asked(6, deadline=0.0))
    assert (late[6].finish, len(late[6].tokens)) in {("length", 1), ("stop_string", 1), ("stop", 1)}
    count = await played.engine.pause()
    await played.engine.submit([asked(number) for number in range(10, 16)])
    played.engine.abort([(number, 0, 0) for number in range(10, 15)])
    assert await played.engine.pause() == count
    await played.engine.resume()
    assert (await played.done.get()).request.key == (15, 0, 0)
    assert played.done.empty()


async def _continues_turns(played: Played, before: Completion) -> None:
    played.check(*(await played.sample(going_on(before, 8, [30, 31, 32]))).values())


async def _updates(played: Played) -> None:
    """New weights of a model with tied embeddings sample new requests, and none starts that needs newer ones."""
    published = played.publish(1, change=move)
    waiting = asyncio.ensure_future(played.sample(asked(20, not_before=1), asked(21, not_before=1)))
    await played.engine.update(published)
    for completion in (await waiting).values():
        assert set(completion.versions) == {1}
        played.check(completion)
    after = await played.engine.logprobs_after(np.arange(5, 15))
    with torch.no_grad():
        expected = played.model(torch.arange(5, 15)[None]).logits[0, -1, :261].log_softmax(-1).numpy()
    likeliest = expected.argsort()[-5:]
    np.testing.assert_allclose(after[likeliest], expected[likeliest], atol=1e-4, rtol=0)


@WHOLE
@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_each_token_has_the_version_that_sampled_it(start: Start, kv: str) -> None:
    """With version 1 the output is uniform over the tokens of the model: its log-probs tell what sampled them."""
    async with start(kv=kv, slots=4, max_new_tokens=400) as played:
        requests = await _lasting(played, 2, tokens=400)
        await played.run(requests)
        await played.engine.update(played.publish(1, change=_flatten))
        found = [await played.done.get() for _ in requests]
        uniform = -np.log(261)
        for completion in found:
            assert sorted(completion.versions) == completion.versions.tolist()
            new = np.abs(completion.logprobs - uniform) < 1e-4
            assert np.array_equal(new, completion.versions == 1)
        assert any(1 in completion.versions for completion in found)


@WHOLE
@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_running_samples_go_on_with_old_or_recomputed_states(start: Start, kv: str) -> None:
    """After an update the log-probs of a running sample are those of the new weights alone only with `recompute`; a
    sample that starts then never reads states of the old weights."""
    async with start(kv=kv, slots=2, max_new_tokens=200) as played:
        (request,) = await _lasting(played, 1, tokens=200)
        await played.run([request])
        await played.engine.update(played.publish(1, change=move))
        running = await played.done.get()
        (fresh,) = (await played.sample(request)).values()
        played.check(fresh)
        new = running.versions == 1
        assert new.any()
        if not new.all():  # Else the update fell before its first token.
            apart = np.abs(running.logprobs - plain_logprobs(played.model, running))[new].max()
            assert apart < 1e-4 if kv == "recompute" else apart > 1e-3


@WHOLE
async def test_an_aborted_sample_ends_while_others_run(start: Start) -> None:
    async with start(slots=2) as played:
        first, second = await _lasting(played, 2, tokens=200)
        await played.run([first, second])
        played.engine.abort([first.key])
        await played.engine.submit([replace(first, key=(90, 0, 0), max_new_tokens=5)])  # It needs the slot.
        found = {each.request.key: len(each.tokens) for each in [await played.done.get() for _ in range(2)]}
        assert found == {(90, 0, 0): 5, second.key: 200}
        assert (played.engine.load().running, played.done.qsize()) == (0, 0)


@WHOLE
async def test_adapters_sample_from_a_step_boundary_on(start: Start) -> None:
    """With `model.lora` a version is its adapters. Those of version 0 add nothing to the base model; running samples go
    on with those of version 1."""
    async with start(kv="recompute", slots=3, max_new_tokens=200, lora={"rank": 4, "alpha": 8.0}) as played:
        requests = await _lasting(played, 2, tokens=200)
        await played.run(requests)
        await played.engine.update(played.publish(1, change=_draw_adapters))
        for completion in [await played.done.get() for _ in requests]:
            new = completion.versions == 1
            expected = plain_logprobs(played.model, completion)
            with base_model(played.model):
                before = plain_logprobs(played.model, completion)
            assert sorted(completion.versions) == completion.versions.tolist()
            np.testing.assert_allclose(completion.logprobs[new], expected[new], atol=1e-4, rtol=0)
            np.testing.assert_allclose(completion.logprobs[~new], before[~new], atol=1e-4, rtol=0)
            assert np.abs(before - expected).max() > 0.1
        (fresh,) = (await played.sample(asked(3, not_before=1))).values()
        played.check(fresh)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
async def test_a_process_killed_in_an_update_leaves_the_weights_whole(engines: Any, start: Start) -> None:
    """The last test, because a vLLM that was killed is dead."""
    ends = nullcontext() if isinstance(engines, TorchEngines) else pytest.raises(ExceptionGroup)
    with ends as ended:
        async with start() as played:
            published = played.publish(1, change=move)
            await engines.kill_in_update(played, published)
            with closing(open_reader(published, published_spec(played.model, "float32"))) as reader:
                assert torch.equal(reader.tensors(published)["model.norm.weight"], played.model.model.norm.weight)
            if ended is not None:
                await asyncio.Event().wait()  # The error of `run` ends this task with its group.
    if ended is not None:
        assert "vLLM's processes have ended" in repr(ended.value.exceptions)
        assert engines.lost_in_update, "the update ended by itself, not with the worker"


async def _lasting(played: Played, count: int, *, tokens: int) -> list[SampleRequest]:
    """Returns requests whose samples reach their limit, so that an update falls into all of them."""
    found: list[SampleRequest] = []
    for number in range(0, 40, 4):
        tried = await played.sample(*(asked(each, tokens) for each in range(number, number + 4)))
        found += [completion.request for completion in tried.values() if completion.finish == "length"]
        if len(found) >= count:
            return found[:count]
    raise AssertionError(f"only {len(found)} of 40 samples reach {tokens} tokens")


def _draw_adapters(model: Any) -> None:
    random = torch.Generator().manual_seed(3)
    for _, layer in adapted(model):
        layer.lora_B.copy_(0.3 * torch.randn(layer.lora_B.shape, generator=random))


def _flatten(model: Any) -> None:
    model.model.norm.weight.zero_()
