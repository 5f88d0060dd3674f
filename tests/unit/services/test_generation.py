"""The service on a tiny model: streams, deadlines, aborts, flips, pauses and rows."""

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextlib import closing
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
from asyncrl.fleet.remote_worker import DEATH_NOTICE
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.bound_socket import on_tcp
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.weights.arena import Writer, open_writer
from asyncrl.lanes.weights.handover import WeightHandover
from asyncrl.lanes.weights.slot_memory import spec_of
from asyncrl.lanes.weights.transports.transport_ends import WeightNetwork, open_sender
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import Canary, PromptGroup, Published
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.seeds import group_seed
from asyncrl.services.generation import GenerationService, SamplingGroup
from tests.unit.services.conftest import Serve
from tests.unit.services.running_generation import core_of, until

INCARNATION = 2


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
def start(folder: Path, config: Config, serve: Serve) -> Serve:
    def started(config: Config = config, service: str = "generation", **options: Any) -> Any:
        here = {"model_dir": folder, "incarnation": INCARNATION, "options": options, "make_compute": ThreadCompute}
        return serve(GenerationService, service, config, **here)

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


async def test_a_group_comes_back_as_rows_with_their_scalars(start: Serve) -> None:
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


async def test_released_rows_are_gone_and_their_texts_left_out(start: Serve) -> None:
    async with start(own_version=0) as service:
        refs = BatchRef.join(await collect(service, group(0)))
        await service.release([row.name for row in refs][:3], oldest=0)
        assert service.rows.used == 1
        assert [text.member for text in await service.texts(refs)] == [refs.rows[3].member]


@pytest.mark.trap("seeds")
async def test_many_groups_at_once_draw_what_one_alone_draws(start: Serve, config: Config) -> None:
    generation = config.generation.model_copy(update={"deterministic": True})
    async with start(config.model_copy(update={"generation": generation}), own_version=0) as service:
        together = await asyncio.gather(*(collect(service, group(number)) for number in range(4)))
        beside_others = responses(service, together[2])
        alone = responses(service, await collect(service, group(2, attempt=1)))
        assert alone == beside_others
        assert len({tuple(tokens) for tokens in alone.values()}) > 1


@pytest.mark.trap("redone")
async def test_a_sample_that_is_done_again_is_the_same_one(start: Serve, config: Config) -> None:
    generation = config.generation.model_copy(update={"deterministic": True})
    async with start(config.model_copy(update={"generation": generation}), own_version=0) as service:
        first = responses(service, await collect(service, group(3)))
        for attempt in (1, 2):
            some = responses(service, await collect(service, group(3, attempt=attempt, members=(1, 3)[attempt - 1 :])))
            assert some == {member: first[member] for member in some}


async def test_closing_the_stream_aborts_what_runs(start: Serve) -> None:
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


@pytest.mark.trap("redone")
async def test_the_deadline_ends_running_samples_as_length(start: Serve) -> None:
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


async def test_a_worker_at_which_no_sample_finishes_is_an_error_that_says_why(start: Serve) -> None:
    async with start() as service:
        with pytest.raises(DeadlineExceeded, match=r"members 0, 1 of group 7, and its weights have version none yet"):
            await collect(service, group(7, members=2, deadline=0.05))
        await until(service, lambda: core_of(service).waiting == 0)


async def test_a_hung_engine_is_found_within_the_deadline(start: Serve) -> None:
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


async def test_weights_flip_while_samples_run(start: Serve, arena: Any) -> None:
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
async def test_how_far_it_is_from_the_trainer_is_told_with_the_version_it_took_over(start: Serve, arena: Any) -> None:
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


async def test_weights_overwritten_while_they_are_taken_over_are_refused_each_time(start: Serve, arena: Any) -> None:
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


async def test_an_idle_engine_flips_and_then_starts_what_waited_for_it(start: Serve, arena: Any) -> None:
    async with start() as service:
        await service.use_weights(arena.publish(0))
        waiting = asyncio.ensure_future(collect(service, group(0, not_before=1)))
        clock = service.context.clock
        await until(service, lambda: core_of(service).waiting == 4 and clock.current == "sync")
        await service.use_weights(arena.publish(1))
        assert {row.first for row in BatchRef.join(await waiting)} == {1}


async def test_an_engine_in_place_reads_the_arena_and_evaluation_a_copy(start: Serve, arena: Any) -> None:
    published = arena.publish(0)
    async with start() as follower, start(service="evaluation") as evaluation:
        assert (await evaluation.use_weights(published)).readers == ()
        await follower.use_weights(published)
        parameters = [next(iter(core_of(service)._flat.model.parameters())) for service in (follower, evaluation)]
        before = [parameter.clone() for parameter in parameters]
        arena.publish(1)
        arena.publish(2)  # over version 0, which nobody leased
        assert [torch.equal(*pair) for pair in zip(parameters, before, strict=True)] == [False, True]


async def test_an_evaluation_worker_that_came_after_the_copy_says_so_at_once(start: Serve, arena: Any) -> None:
    """The copy went to its predecessor; without this it would wait for weights until the deadline."""
    async with start(service="evaluation") as evaluation:
        with pytest.raises(PeerLost, match="was started after the weights of version 1 were copied"):
            await collect(evaluation, group(0, not_before=1))


async def test_pause_holds_at_the_step_it_names(start: Serve) -> None:
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


async def test_an_abort_in_a_pause_and_a_resume_too_many_leave_the_engine_at_work(start: Serve) -> None:
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


async def test_other_incarnations_are_refused(start: Serve, arena: Any) -> None:
    async with start(own_version=0) as service:
        with pytest.raises(Refused, match=r"group 0 has incarnation 1; generation0.0-2-12345678 has incarnation 2"):
            await collect(service, group(0, incarnation=1))
        with pytest.raises(Refused, match="version 0 has incarnation 1"):
            await service.use_weights(arena.publish(0, incarnation=1))


async def test_a_prompt_that_does_not_fit_is_the_callers_error(start: Serve) -> None:
    async with start(own_version=0) as service:
        with pytest.raises(TaskError, match=r"task.max_prompt_tokens is 16"):
            await collect(service, group(0, prompt="x" * 17))
        assert len(await collect(service, group(1))) == 4


# ---- another trainer takes over from a checkpoint while the service stays --------------------------------------------


async def test_in_the_next_incarnation_only_the_engine_is_the_same(start: Serve, arena: Any, folder: Path) -> None:
    """Rows, requests and weights of the one before are gone; the same group samples what a new worker samples."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    successor = open_writer(f"test-{uuid4().hex[:8]}", spec_of(model, "float32"), "inproc")
    weights = dict(model.named_parameters(remove_duplicate=False))
    async with start() as service:
        await service.use_weights(arena.publish(7))
        rows = BatchRef.join(await collect(service, group(0)))
        running = asyncio.ensure_future(collect(service, group(1, members=9)))
        core = core_of(service)
        await until(service, lambda: core.running > 0)
        running.cancel()
        await asyncio.wait([running])
        await service.renew(service.context.facts.renewed(INCARNATION + 1, folder))
        assert (core.running, core.waiting, core.cache_used, service.rows.used) == (0, 0, 0.0, 0)
        assert (service.weights_version, await service.texts(rows)) == (None, [])
        with pytest.raises(Refused, match=r"group 0 has incarnation 2"):
            await collect(service, group(0))
        again = asyncio.ensure_future(collect(service, group(1, incarnation=INCARNATION + 1)))
        await until(service, lambda: core.waiting > 0)
        assert core.running == 0, "the weights of the trainer that died sample nothing"
        await service.use_weights(successor.write(INCARNATION + 1, 5, weights))
        found = await again
        assert {(row.incarnation, row.first) for ref in found for row in ref} == {(INCARNATION + 1, 5)}
        sampled = responses(service, found)
    async with start(own_version=5) as fresh:
        assert responses(fresh, await collect(fresh, group(1))) == sampled
    successor.close()


async def test_weights_that_came_over_a_network_come_from_the_next_trainer(start: Serve, folder: Path) -> None:
    """The trainers publish the same version of other weights: what is sampled is by the second one's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = dict(model.named_parameters(remove_duplicate=False))
    spec = spec_of(model, "float32")
    async with start(own_version=5) as fresh:
        expected = responses(fresh, await collect(fresh, group(1)))
    with closing(ZmqWire(CurveKeys.fresh())) as wire:
        async with start() as service, asyncio.TaskGroup() as tasks:
            service.context.reader.wire = wire
            network = WeightNetwork(wire, on_tcp("127.0.0.1", "*"), service.context.spec.hello, tasks)
            first, second = (open_sender("tcp", "", spec, lambda: network, folder) for _ in range(2))
            with torch.no_grad():
                moved = {name: value + 0.1 for name, value in weights.items()}
            await service.use_weights(await asyncio.to_thread(first.write, INCARNATION, 5, moved))
            assert responses(service, await collect(service, group(1))) != expected
            await service.renew(service.context.facts.renewed(INCARNATION + 1, folder))
            first.close()
            await service.use_weights(await asyncio.to_thread(second.write, INCARNATION + 1, 5, weights))
            again = await collect(service, group(1, incarnation=INCARNATION + 1))
            assert responses(service, again) == expected
            second.close()


# ---- a rank that follows others while it samples: it has no rows, and ends after the one that died -------------------


PUBLISHED = Published(1, 4, "", 0, "", canary=Canary((0,), (0,), (-1.0,)))


class StandInEngine:
    """Has the version that it is given. put_away returns when it may."""

    tokenizer = turns = context = None
    version = -1

    def __init__(self) -> None:
        self.may_put_away = asyncio.Event()

    async def update(self, published: Published) -> None:
        self.version = published.version

    async def load_own(self, version: int) -> None:
        self.version = version

    async def put_away(self) -> None:
        await self.may_put_away.wait()

    async def logprobs_after(self, prompt: object) -> None:
        raise Refused("the leader is asked")

    async def run(self, deliver: object) -> None:
        raise PeerLost("the leader is gone")

    def close(self) -> None:
        pass


def following(engine: Any) -> SamplingGroup:
    return SamplingGroup(SimpleNamespace(end=lambda: None), engine, follows=True)  # type: ignore[arg-type]


async def test_a_rank_that_follows_takes_weights_and_answers_nothing(
    config: Config, worker_context: Callable[..., WorkerContext], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = StandInEngine()
    handover = WeightHandover()

    async def opened(context: WorkerContext) -> SamplingGroup:
        return following(engine)

    monkeypatch.setattr(SamplingGroup, "open", opened)
    monkeypatch.setattr(SamplingGroup, "run", lambda group, deliver: asyncio.sleep(0))
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        context = worker_context("generation", config, tasks, layout=Layout(tp=2), rank=1, handover=handover)
        service = GenerationService(context)
        await service.start()
        assert service.rows is None
        assert await service.restore_rows(str(tmp_path), BatchRef(())) == BatchRef(())
        using = await service.use_weights(PUBLISHED)
        assert (using.version, using.canary, using.readers) == (4, None, (context.spec.instance,))
        weights: dict[str, Any] = {}
        await handover.offer(5, weights)
        putting_away = asyncio.ensure_future(handover.put_away())
        await service.use_weights(replace(PUBLISHED, version=5))
        assert not putting_away.done(), "the leader may still load this version"
        assert handover.take(5) is weights
        engine.may_put_away.set()
        await putting_away
        await service.stop()


async def test_the_death_of_another_rank_is_reported_before_the_end_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    async def noted(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", noted)
    with pytest.raises(PeerLost):
        await following(StandInEngine()).run(lambda done: None)
    assert waits == [DEATH_NOTICE]
