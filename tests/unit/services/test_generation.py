"""The service on a tiny model: streams, deadlines, aborts, flips, pauses and rows."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import Config
from asyncrl.engines.canary_logprobs import canary_distance
from asyncrl.engines.generation.engine_interface import Completion
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer
from asyncrl.errors import DeadlineExceeded, PeerLost, Refused, TaskError, WeightsError
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.weights.arena import Writer, open_writer
from asyncrl.lanes.weights.slot_memory import spec_of
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import Canary, PromptGroup, Published
from asyncrl.protocols.seeds import group_seed
from asyncrl.services.generation import GenerationService
from tests.unit.services.running_generation import core_of, running_generation, until

INCARNATION = 2

Start = Callable[..., AbstractAsyncContextManager[GenerationService]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = build_tokenizer(("left", "right"))
    target = tmp_path_factory.mktemp("model")
    build_model(tokenizer).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


@pytest.fixture
def config() -> Config:
    return Config.model_validate(
        {
            "model": {"name": "tiny"},
            "task": {
                "prompts": "unused.jsonl",
                "max_prompt_tokens": 16,
                "prompts_per_step": 2,
                "samples_per_prompt": 4,
            },
            "generation": {"slots": 6, "max_new_tokens": 12},
        }
    )


@pytest.fixture
def start(folder: Path, config: Config, worker_context: Callable[..., WorkerContext]) -> Start:
    @asynccontextmanager
    async def started(config: Config = config, service: str = "generation", **options: Any) -> AsyncIterator[Any]:
        here = {"model_dir": folder, "incarnation": INCARNATION, "options": options, "make_compute": ThreadCompute}
        async with running_generation(lambda tasks: worker_context(service, config, tasks, **here)) as made:
            yield made

    return started


@pytest.fixture
def arena(folder: Path) -> Any:
    """A trainer's end: publish(version) writes slightly moved weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    writer: Writer = open_writer(f"test-{uuid4().hex[:8]}", spec_of(model, "float32"), "inproc")

    def publish(version: int, incarnation: int = INCARNATION) -> Published:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + 0.01 * version)
        return writer.write(incarnation, version, dict(model.named_parameters(remove_duplicate=False)))

    yield SimpleNamespace(publish=publish, leases=writer.leases)
    writer.close()


def group(number: int, members: int | tuple[int, ...] = 4, **changes: Any) -> PromptGroup:
    plain = PromptGroup(
        id=number,
        attempt=0,
        incarnation=INCARNATION,
        prompt=f"go left {number}",
        members=tuple(range(members)) if isinstance(members, int) else members,
        seed=group_seed(1, number),
        not_before=-1,
        temperature=1.0,
        max_new_tokens=12,
        deadline=60.0,
    )
    return replace(plain, **changes)


async def collect(service: GenerationService, prompts: PromptGroup) -> list[BatchRef]:
    """A reference of its own for each sample."""
    return [BatchRef((row,)) async for samples in service.generate(prompts) for row in samples]


def responses(service: GenerationService, refs: list[BatchRef]) -> dict[int, list[int]]:
    """Sampled tokens by member."""
    rows = [row for ref in refs for row in ref]
    return {row.member: service.rows.read(row.places[0], ["response_ids"])[0].tolist() for row in rows}


async def test_a_group_comes_back_as_rows_with_their_scalars(start: Start) -> None:
    async with start(own_version=3) as service:
        refs = await collect(service, group(5))
        assert sorted(row.key for ref in refs for row in ref) == [(5, 0), (5, 1), (5, 2), (5, 3)]
        for (row,) in refs:
            (place,) = row.places
            prompt, response, logprobs, versions, text = service.rows.read(place, place.columns)
            assert place.columns == ("prompt_ids", "response_ids", "logprobs", "versions", "text")
            assert [a.dtype.name for a in (prompt, response, logprobs, versions, text)] == [
                "int32",
                "int32",
                "float32",
                "int32",
                "uint8",
            ]
            assert (len(prompt), len(response)) == (row.prompt_tokens, row.tokens)
            assert len(logprobs) == len(versions) == row.tokens
            assert (row.incarnation, row.first, row.last, row.attempt) == (INCARNATION, 3, 3, 0)
            assert row.finish in ("stop", "length")
            assert (logprobs <= 0).all()
        (found,) = await service.texts(refs[0])
        assert found.prompt == "go left 5"
        assert found.text.encode() == bytes(service.rows.read(refs[0].rows[0].places[0], ["text"])[0])
        ids, logprobs = service.rows.read(refs[0].rows[0].places[0], ["response_ids", "logprobs"])
        assert found.token_ids == tuple(ids.tolist())
        assert found.token_logprobs == pytest.approx(logprobs, abs=1e-4)
        assert found.token_versions == (3,) * len(ids)


async def test_released_rows_are_gone_and_their_texts_left_out(start: Start) -> None:
    async with start(own_version=0) as service:
        refs = BatchRef.join(await collect(service, group(0)))
        await service.release([row.name for row in refs][:3], oldest=0)
        assert service.rows.used == 1
        assert [text.member for text in await service.texts(refs)] == [refs.rows[3].member]


@pytest.mark.trap("seeds")
async def test_many_groups_at_once_draw_what_one_alone_draws(start: Start, config: Config) -> None:
    generation = config.generation.model_copy(update={"deterministic": True})
    async with start(config.model_copy(update={"generation": generation}), own_version=0) as service:
        together = await asyncio.gather(*(collect(service, group(number)) for number in range(4)))
        beside_others = responses(service, together[2])
        alone = responses(service, await collect(service, group(2, attempt=1)))
        assert alone == beside_others
        assert len({tuple(tokens) for tokens in alone.values()}) > 1


@pytest.mark.trap("redone")
async def test_a_sample_that_is_done_again_is_the_same_one(start: Start, config: Config) -> None:
    generation = config.generation.model_copy(update={"deterministic": True})
    async with start(config.model_copy(update={"generation": generation}), own_version=0) as service:
        first = responses(service, await collect(service, group(3)))
        for attempt in (1, 2):
            some = responses(service, await collect(service, group(3, attempt=attempt, members=(1, 3)[attempt - 1 :])))
            assert some == {member: first[member] for member in some}


async def test_rows_whose_caller_never_got_them_are_freed_when_their_sample_is_done_with(start: Start) -> None:
    """Their answer and the Cancel of its call crossed, and the next attempt runs in another replica."""
    async with start(own_version=1) as service:
        await collect(service, group(5))
        kept = BatchRef.join(await collect(service, group(6)))
        await service.release([(5, member, 1) for member in range(4)], oldest=5)
        assert service.rows.used == len(kept)


async def test_a_new_attempt_frees_the_rows_that_its_caller_never_got(start: Start) -> None:
    async with start(own_version=0) as service:
        for attempt in range(20):
            await collect(service, group(0, attempt=attempt))
        assert service.rows.used == 4


async def test_closing_the_stream_aborts_what_runs(start: Start) -> None:
    async with start(own_version=0) as service:
        await service.pause()
        waiting = asyncio.ensure_future(collect(service, group(0, members=30)))
        await until(service, lambda: core_of(service).waiting == 30)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(service, lambda: core_of(service).waiting == 0)
        assert service.counters["aborted"] == 30
        await service.resume()
        assert len(await collect(service, group(1))) == 4
        assert service.rows.used == 4


async def test_a_closed_stream_frees_its_slots_for_others(start: Start) -> None:
    async with start(own_version=0) as service:
        async with aclosing(service.generate(group(0, members=12))) as stream:
            await anext(stream)
        assert len(await collect(service, group(1))) == 4
        await until(service, lambda: core_of(service).running == 0)


@pytest.mark.trap("redone")
async def test_the_deadline_ends_running_samples_as_length(start: Start) -> None:
    """It counts the seconds in a slot: of thirty samples in eight slots the last ones wait twice as long as it is."""
    async with start(own_version=0) as service:
        seconds = itertools.count()
        core_of(service)._batch.clock = lambda: float(next(seconds))
        slots = service.context.config.generation.slots
        refs = await collect(service, group(0, members=3 * slots, deadline=5.0))
        rows = [row for ref in refs for row in ref]
        assert len(rows) == 3 * slots
        cut = [row.tokens for row in rows if row.finish == "length"]
        assert len(cut) > slots
        assert all((row.cut, row.late) == (0, int(row.finish == "length")) for row in rows)
        assert not any(row.truncated for row in rows), "generation.max_new_tokens ended none of them"
        assert all(row.tokens <= 5 for row in rows)
        assert max(row.tokens for row in rows if row.member >= 2 * slots) > 1, "the wait for a slot does not count"


async def test_a_worker_at_which_no_sample_finishes_is_an_error_that_says_why(start: Start) -> None:
    async with start() as service:
        with pytest.raises(DeadlineExceeded, match=r"members 0, 1 of group 7, and its weights have version none yet"):
            await collect(service, group(7, members=2, deadline=0.05))
        await until(service, lambda: core_of(service).waiting == 0)


async def test_a_hung_engine_is_found_within_the_deadline(start: Start) -> None:
    async with start(own_version=0) as service:
        hung = threading.Event()

        def hang() -> list[Completion]:
            hung.wait()
            return []

        core_of(service).step = hang
        found = r"no sample of \S+ finished within 0.3 s: it runs 0 samples, 4 wait"
        try:
            with pytest.raises(DeadlineExceeded, match=found):
                async with asyncio.timeout(60):
                    await collect(service, group(7, deadline=0.2))
        finally:
            hung.set()


async def test_weights_flip_while_samples_run(start: Start, arena: Any) -> None:
    async with start() as service:
        first = arena.publish(0)
        assert (await service.health())[0].version is None
        using = await service.use_weights(first)
        assert (using.readers, using.version) == ((service.context.spec.instance,), 0)
        arena.leases.using(using.readers[0], 0)
        running = asyncio.ensure_future(collect(service, group(0, members=24)))
        await until(service, lambda: core_of(service).running > 0)
        await service.pause()
        await service.context.compute.run(lambda: None)
        finished = service.counters["samples"]
        sampling = core_of(service).running
        assert (await service.use_weights(arena.publish(1))).version == 1
        await service.resume()
        rows = BatchRef.join(await running).rows
        assert len(rows) == 24
        (health,) = await service.health()
        assert health.version == 1
        assert (health.counters["samples"], health.counters["tokens"]) == (24, sum(row.tokens for row in rows))
        assert sum(row.last == 1 for row in rows) == 24 - finished
        assert sum(row.first == 0 and row.last == 1 for row in rows) == sampling
        assert (await service.use_weights(first)).version == 1
        assert service.context.clock.spent()[1]["sync"] > 0


@pytest.mark.trap("engines_disagree")
async def test_how_far_it_is_from_the_trainer_is_told_with_the_version_it_took_over(start: Start, arena: Any) -> None:
    async with start() as service, start(service="evaluation") as evaluation:
        published = arena.publish(0)
        assert (await service.use_weights(published)).canary is None
        said = core_of(service).logprobs_after(np.arange(3))
        canary = Canary((0, 1, 2), (4, 3), (float(said[4]) + 0.25, float(said[3]) - 0.125))
        moved = replace(arena.publish(1), canary=canary)
        told = await service.use_weights(moved)
        now = core_of(service).logprobs_after(np.arange(3))
        assert told.canary == pytest.approx(canary_distance(canary, now))
        assert not np.array_equal(now, said), "it is the new weights that are asked"
        assert (await service.use_weights(moved)).canary == told.canary
        assert (await evaluation.use_weights(moved)).canary is None


async def test_weights_overwritten_while_they_are_taken_over_are_refused_each_time(start: Start, arena: Any) -> None:
    """No lease keeps version 3 from the slot of version 1. A failed call leaves nothing that a repeated one trusts."""
    async with start(service="evaluation") as evaluation:
        published = arena.publish(1)
        load = core_of(evaluation).load

        def load_while_it_is_overwritten(*args: Any, **settings: Any) -> None:
            load(*args, **settings)
            arena.publish(3)

        core_of(evaluation).load = load_while_it_is_overwritten
        for _ in range(2):
            with pytest.raises(WeightsError, match="holds version 3 of incarnation 2, not version 1"):
                await evaluation.use_weights(published)


async def test_an_idle_engine_flips_and_then_starts_what_waited_for_it(start: Start, arena: Any) -> None:
    async with start() as service:
        await service.use_weights(arena.publish(0))
        waiting = asyncio.ensure_future(collect(service, group(0, not_before=1)))
        clock = service.context.clock
        await until(service, lambda: core_of(service).waiting == 4 and clock.current == "sync")
        await service.use_weights(arena.publish(1))
        assert {row.first for row in BatchRef.join(await waiting)} == {1}


async def test_an_engine_in_place_reads_the_arena_and_evaluation_a_copy(start: Start, arena: Any) -> None:
    published = arena.publish(0)
    async with start() as follower, start(service="evaluation") as evaluation:
        assert (await evaluation.use_weights(published)).readers == ()
        await follower.use_weights(published)
        parameters = [next(iter(core_of(service)._flat.model.parameters())) for service in (follower, evaluation)]
        before = [parameter.clone() for parameter in parameters]
        arena.publish(1)
        arena.publish(2)  # over version 0, which nobody leased
        assert [torch.equal(*pair) for pair in zip(parameters, before, strict=True)] == [False, True]


async def test_an_evaluation_worker_that_came_after_the_copy_says_so_at_once(start: Start, arena: Any) -> None:
    """The copy went to its predecessor; without this it would wait for weights until the deadline."""
    async with start(service="evaluation") as evaluation:
        with pytest.raises(PeerLost, match="was started after the weights of version 1 were copied"):
            await collect(evaluation, group(0, not_before=1))


async def test_pause_holds_at_the_step_it_names(start: Start) -> None:
    async with start(own_version=0) as service:
        running = asyncio.ensure_future(collect(service, group(0, members=20)))
        async with asyncio.timeout(60):
            while (await service.pause()).at < 2:
                await service.resume()
                await service.context.compute.run(lambda: None)
        boundary = await service.pause()
        assert boundary.kind == "decode step"
        await service.context.compute.run(lambda: None)
        assert (await service.pause()).at == boundary.at
        assert not running.done()
        assert (await service.resume()).at == boundary.at
        assert len(await running) == 20


async def test_an_abort_in_a_pause_and_a_resume_too_many_leave_the_engine_at_work(start: Start) -> None:
    async with start(own_version=0) as service:
        abandoned = asyncio.ensure_future(collect(service, group(0, members=20)))
        await until(service, lambda: core_of(service).running > 0)
        paused = [await service.pause(), await service.pause()]
        assert paused[0] == paused[1]
        abandoned.cancel()
        await asyncio.wait([abandoned])
        await until(service, lambda: core_of(service).running == core_of(service).waiting == 0)
        assert service.counters["aborted"] > 0
        await asyncio.gather(service.resume(), service.resume())
        assert len(await collect(service, group(1, members=20))) == 20


async def test_other_incarnations_are_refused(start: Start, arena: Any) -> None:
    async with start(own_version=0) as service:
        with pytest.raises(Refused, match=r"group 0 has incarnation 1; generation0.0-2-12345678 has incarnation 2"):
            await collect(service, group(0, incarnation=1))
        with pytest.raises(Refused, match="version 0 has incarnation 1"):
            await service.use_weights(arena.publish(0, incarnation=1))


async def test_a_prompt_that_does_not_fit_is_the_callers_error(start: Start) -> None:
    async with start(own_version=0) as service:
        with pytest.raises(TaskError, match=r"task.max_prompt_tokens is 16"):
            await collect(service, group(0, prompt="x" * 17))
        assert len(await collect(service, group(1))) == 4


async def test_idle_time_is_booked_as_told(start: Start) -> None:
    async with start(own_version=0) as service:
        await collect(service, group(0))
        await service.idle_because("blocked")
        await until(service, lambda: service.context.clock.current == "blocked")
