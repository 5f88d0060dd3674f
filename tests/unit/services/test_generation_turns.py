"""Episodes at the generation service: rows of several turns, whoever goes on with them."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.schema import Config
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer
from asyncrl.engines.training.train_rows import SampleRow, contexts_of
from asyncrl.environments.transcript import context_message
from asyncrl.errors import TaskError
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.messages import PromptGroup
from asyncrl.services.generation import GenerationService
from tests.unit.services.conftest import Serve
from tests.unit.services.running_generation import core_of, until

COLUMNS = ("prompt_ids", "response_ids", "logprobs", "versions", "spans", "transcript", "text")
CHATML = (
    "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAX_TOKENS = 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = build_tokenizer(("left", "right"))
    tokenizer.chat_template = CHATML
    target = tmp_path_factory.mktemp("model")
    model = build_model(tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # logits that are not flat
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


@pytest.fixture
def config() -> Config:
    task = {"prompts": "unused.jsonl", "max_prompt_tokens": 40, "prompts_per_step": 2, "samples_per_prompt": 4}
    generation = {"slots": 6, "max_new_tokens": 8, "deterministic": True}
    environment = {"use": "unused.py:Unused", "max_tokens": MAX_TOKENS}
    sections = {"task": task, "generation": generation, "environment": environment}
    return Config.model_validate({"model": {"name": "tiny"}, **sections})


class PlayedEnvironment:
    """Stores what a service sampled, with what it says itself, as the environment's worker does."""

    def __init__(self) -> None:
        self.store = RowStore.private("inproc://environment", 64, 1 << 16)

    def step(self, service: GenerationService, samples: BatchRef, *said: str, role: str = "user") -> BatchRef:
        return self.answer(service, samples, [{"role": role, "content": text} for text in said])

    def answer(self, service: GenerationService, samples: BatchRef, said: list[dict[str, Any]]) -> BatchRef:
        return BatchRef(tuple(self._answer(service, row, said) for row in samples))

    def _answer(self, service: GenerationService, row: RowRef, said: list[dict[str, Any]]) -> RowRef:
        columns = dict(zip(COLUMNS, columns_of(service, row), strict=True))
        transcript = json.dumps(json.loads(bytes(columns["transcript"])) + said)
        columns |= {"transcript": np.frombuffer(transcript.encode(), np.uint8)}
        columns |= {"turn_rewards": np.zeros(row.turns, np.float32)}
        return row._replace(finish="", places=(self.store.put(columns),))


@pytest.fixture
def environment() -> PlayedEnvironment:
    return PlayedEnvironment()


@pytest.fixture
def start(folder: Path, config: Config, serve: Serve, environment: PlayedEnvironment) -> Serve:
    def started(config: Config = config, version: int = 0) -> Any:
        here = {"options": {"own_version": version}, "source": environment.store, "model_dir": folder}
        return serve(GenerationService, "generation", config, make_compute=ThreadCompute, **here)

    return started


def group(prompt: Any = "go left: ", members: tuple[int, ...] = (0, 1, 2), **changes: Any) -> PromptGroup:
    return replace(PromptGroup(3, 0, 1, prompt, members, 77, -1, 1.0, 8, 60.0), **changes)


async def sampled(service: GenerationService, prompts: PromptGroup) -> BatchRef:
    rows = [row async for samples in service.generate(prompts) for row in samples]
    return BatchRef(tuple(sorted(rows, key=lambda row: row.member)))


def going_on(prompts: PromptGroup, rows: BatchRef) -> PromptGroup:
    return replace(prompts, members=tuple(row.member for row in rows), continues=rows)


def columns_of(service: GenerationService, row: RowRef) -> list[Any]:
    assert service.rows is not None
    (place,) = row.places
    return [each.copy() for each in service.rows.read(place, list(COLUMNS))]


async def played(
    service: GenerationService, environment: PlayedEnvironment, prompts: PromptGroup, *said: str
) -> BatchRef:
    rows = await sampled(service, prompts)
    for text in said:
        rows = await sampled(service, going_on(prompts, environment.step(service, rows, text)))
    return rows


@pytest.mark.parametrize("prompt", ["go left: ", [{"role": "user", "content": "go left"}]], ids=["text", "chat"])
async def test_a_row_has_the_turns_so_far_and_their_logprobs_are_those_of_a_plain_forward(
    start: Serve, environment: PlayedEnvironment, folder: Path, prompt: Any
) -> None:
    async with start(version=4) as service:
        for row in await played(service, environment, group(prompt), " no", " not at all", " yes"):
            prompt_ids, response, logprobs, versions, spans, transcript, text = columns_of(service, row)
            messages = json.loads(bytes(transcript))
            assert [each["role"] for each in messages] == ["assistant", "user"] * 3 + ["assistant"]
            assert [each["content"] for each in messages[1::2]] == [" no", " not at all", " yes"]
            assert messages[-1]["content"] == bytes(text).decode()
            own = spans[::2]
            given = spans[1::2]
            assert (row.turns, row.given, row.tokens) == (4, given.sum(), own.sum()) == (4, row.given, len(versions))
            assert (row.prompt_tokens, row.first, row.last) == (len(prompt_ids), 4, 4)
            assert given[-1] == 0 < given[:-1].min()
            starts = np.cumsum(spans) - spans
            mask = np.concatenate([np.arange(a, a + n) for a, n in zip(starts[::2], own, strict=True)])
            found = plain_logprobs(folder, prompt_ids, response)[mask]
            np.testing.assert_allclose(logprobs, found, atol=1e-5, rtol=0)


def plain_logprobs(folder: Path, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    with torch.no_grad():
        every = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    found: np.ndarray = every.gather(-1, ids[len(prompt) :, None])[:, 0].numpy()
    return found


async def test_given_tokens_are_the_rendered_messages_and_nothing_sampled_is_tokenized_again(
    start: Serve, environment: PlayedEnvironment, folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    async with start() as service:
        prompts = group([{"role": "user", "content": "go left"}])
        first = await sampled(service, prompts)
        before = [columns_of(service, row) for row in first]
        second = await sampled(service, going_on(prompts, environment.step(service, first, "a", "b")))
        for row, (_, response, *_) in zip(second, before, strict=True):
            _, after, *_ = columns_of(service, row)
            assert after[: len(response)].tolist() == response.tolist()
            ended = response[-1] == tokenizer.eos_token_id
            said = "<eos>" * (not ended) + "<user>a<eos><user>b<eos><assistant>"
            assert tokenizer.decode(after[len(response) : len(response) + row.given]) == said


async def test_an_environment_begins_contexts_of_which_each_is_seen_alone(
    start: Serve, environment: PlayedEnvironment, folder: Path
) -> None:
    """The third one goes on where the first one was, token by token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    other = [{"role": "system", "content": "<eos>"}, {"role": "assistant", "content": "b"}, *said("c")]
    async with start() as service:
        prompts = group(said("a"))
        rows = await sampled(service, prompts)
        for messages, follows in ((other, 0), (said("d"), 1)):
            begun = [context_message(messages, (), follows)]
            rows = await sampled(service, going_on(prompts, environment.answer(service, rows, begun)))
        for row in rows:
            prompt, response, logprobs, _, spans, *_ = columns_of(service, row)
            assert (row.turns, row.tokens) == (3, len(logprobs))
            assert row.given == -spans[1] - spans[3] > 0 > max(spans[1], spans[3])
            first, second, third = contexts_of(SampleRow(prompt, response, spans=spans))
            assert tokenizer.decode(second.prompt) == "<system><eos><eos><assistant>b<eos><user>c<eos><assistant>"
            assert second.prompt.tolist().count(tokenizer.eos_token_id) == 3, "what looks like an end is text"
            before = [*first.prompt, *first.response]
            assert third.prompt.tolist()[: len(before)] == before
            ended = before[-1] == tokenizer.eos_token_id
            assert tokenizer.decode(third.prompt[len(before) :]) == "<eos>" * (not ended) + "<user>d<eos><assistant>"
            found = [plain_logprobs(folder, each.prompt, each.response) for each in (first, second, third)]
            np.testing.assert_allclose(logprobs, np.concatenate(found), atol=1e-5, rtol=0)


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


async def test_an_episode_is_shown_with_what_its_environment_said_last(
    start: Serve, environment: PlayedEnvironment
) -> None:
    async with start() as service:
        rows = environment.step(service, await played(service, environment, group("go left: "), " no"), " yes")
        gone = rows.rows[1]
        environment.store.free(gone.places)
        shown = await service.texts(rows)
        assert [text.member for text in shown] == [0, 2]
        for text in shown:
            assert text.prompt == "go left: "
            assert [turn["role"] for turn in text.turns] == ["assistant", "user"] * 2
            assert [turn["content"] for turn in text.turns[1::2]] == [" no", " yes"]
            assert text.text == text.turns[2]["content"]
            seen = re.sub("<(bos|eos|pad|unk)>", "", text.context)  # Special tokens that were sampled are shown too.
            assert seen == f"go left: {text.turns[0]['content']} no"
            assert text.turn_rewards == (0.0, 0.0)
            tokens = next(row.tokens for row in rows if row.member == text.member)
            assert len(text.token_ids) == len(text.token_logprobs) == len(text.token_versions) == tokens


async def test_the_next_turn_is_the_same_at_another_worker(start: Serve, environment: PlayedEnvironment) -> None:
    async with start() as one, start() as other:
        first = await sampled(one, group())
        continued = going_on(group(), environment.step(one, first, " no"))
        here = await sampled(one, continued)
        there = await sampled(other, continued)
        for left, right in zip(here, there, strict=True):
            for mine, others in zip(columns_of(one, left), columns_of(other, right), strict=True):
                assert mine.tobytes() == others.tobytes()


async def test_a_turn_waits_for_the_weights_that_sampled_the_turn_before(
    start: Serve, environment: PlayedEnvironment
) -> None:
    """Another worker may have older weights, and the versions of a sample never fall."""
    async with start(version=5) as one, start(version=4) as other:
        rows = environment.step(one, await sampled(one, group()), " no")
        waiting = asyncio.ensure_future(sampled(other, going_on(group(), rows)))
        await until(other, lambda: core_of(other).waiting == len(rows))
        assert not core_of(other).active
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_members_go_on_one_by_one_and_a_turn_frees_the_row_of_the_turns_before(
    start: Serve, environment: PlayedEnvironment
) -> None:
    async with start() as service:
        assert service.rows is not None
        rows = environment.step(service, await sampled(service, group()), " no")
        for row in reversed(rows.rows):
            (after,) = await sampled(service, going_on(group(), BatchRef((row,))))
            assert (after.member, after.turns) == (row.member, 2)
            assert service.rows.used == len(rows)
        await service.release([row.name for row in rows], 0)
        assert service.rows.used == 0


async def test_an_episode_without_room_for_one_more_token_ends_as_it_was(
    start: Serve, environment: PlayedEnvironment
) -> None:
    async with start() as service:
        first = await sampled(service, group(members=(0,)))
        (row,) = first
        room = MAX_TOKENS - row.tokens
        fits = environment.step(service, first, "x" * (room - 1))
        too_long = environment.step(service, first, "x" * room)
        (last,) = await sampled(service, going_on(group(), fits))
        assert (last.tokens - row.tokens, last.given, last.finish in ("length", "stop")) == (1, room - 1, True)
        (ended,) = await sampled(service, going_on(group(), too_long))
        assert ended == too_long.rows[0]._replace(finish="token_limit")


async def test_turns_that_met_max_new_tokens_are_counted_where_they_are_sampled(
    start: Serve, environment: PlayedEnvironment
) -> None:
    """An answer that the room of its episode ended is none of them, and nor is an episode that its own limit ended."""
    async with start() as service:
        counted = dict.fromkeys(range(3), 0)
        most = group().max_new_tokens
        without_room = 0
        rows = await sampled(service, group())
        while len(rows):
            for row in rows:
                columns = columns_of(service, row)
                own = int(columns[4][-2])
                newest = json.loads(bytes(columns[5]))[-1]
                ended = row.finish == "length" and own == most
                without_room += row.finish == "length" and own < most
                counted[row.member] += ended
                assert (row.cut, newest.get("finish")) == (counted[row.member], "length" if ended else None)
                assert row._replace(finish="turn_limit").truncated is (counted[row.member] > 0)
            said = environment.step(service, rows, "x" * 21)
            going = BatchRef(tuple(row for row in said if row.tokens + row.given < MAX_TOKENS - 21))
            rows = await sampled(service, going_on(group(), going)) if len(going) else going
        assert max(counted.values()) > 1
        assert without_room


async def test_what_cannot_be_shown_is_an_error_that_names_the_member(
    start: Serve, environment: PlayedEnvironment
) -> None:
    async with start() as service:
        prompts = group([{"role": "user", "content": "go"}])
        rows = environment.step(service, await sampled(service, prompts), "4", role="tool")
        says = r"group 3, member 0, turn 1: an environment cannot answer in the role 'tool': .*leaves out messages"
        with pytest.raises(TaskError, match=says):
            await sampled(service, going_on(prompts, rows))
        with pytest.raises(TaskError, match=r"group 3, member 9 is to go on, but `continues` has no row"):
            await sampled(service, replace(going_on(prompts, rows), members=(0, 9)))
        with pytest.raises(TaskError, match="in the role 'tool'"):
            await sampled(service, replace(prompts, tools=({"name": "add"},)))


async def test_turns_are_bounded_by_the_episode_and_the_prompt_by_both(
    start: Serve, config: Config, environment: PlayedEnvironment
) -> None:
    short = config.model_copy(update={"environment": config.environment.model_copy(update={"max_tokens": 5})})
    async with start(short) as service:
        assert all(row.tokens <= 5 for row in await sampled(service, group()))
    long = config.model_copy(update={"environment": config.environment.model_copy(update={"max_tokens": 251})})
    async with start(long) as service:
        with pytest.raises(TaskError, match=r"with environment.max_tokens = 251 .*, or write max_tokens = 250"):
            await sampled(service, group())


async def test_turns_go_on_with_parked_keys_until_their_samples_are_released(
    start: Serve, config: Config, environment: PlayedEnvironment, folder: Path
) -> None:
    generation = config.generation.model_copy(update={"deterministic": False})
    sections = {"generation": generation, "environment": config.environment.model_copy(update={"max_turns": 3})}
    async with start(config.model_copy(update=sections)) as service:
        rows = await played(service, environment, group(), " no")
        assert (service.counters["parked_hits"], service.counters["parked_misses"]) == (3, 0)
        assert len(core_of(service).parked) == 3
        answered = environment.step(service, rows, " yes")
        await service.release([rows.rows[0].name], oldest=0)
        rows = await sampled(service, going_on(group(), answered))
        assert (service.counters["parked_hits"], service.counters["parked_misses"]) == (5, 1)
        assert len(core_of(service).parked) == 0, "there is no turn after the third"
        for row in rows:
            prompt, response, logprobs, _, spans, *_ = columns_of(service, row)
            mask = np.concatenate([np.full(n, place % 2 == 0) for place, n in enumerate(spans)])
            np.testing.assert_allclose(logprobs, plain_logprobs(folder, prompt, response)[mask], atol=1e-5, rtol=0)
        again = await played(service, environment, group(attempt=1))
        assert len(core_of(service).parked) == 3
        await service.release([], oldest=again.rows[0].group + 1)
        await until(service, lambda: len(core_of(service).parked) == 0)


async def test_closing_the_stream_of_a_turn_gives_up_what_was_parked(
    start: Serve, config: Config, environment: PlayedEnvironment
) -> None:
    generation = config.generation.model_copy(update={"deterministic": False})
    async with start(config.model_copy(update={"generation": generation})) as service:
        rows = environment.step(service, await sampled(service, group()), " no")
        await service.pause()
        waiting = asyncio.ensure_future(sampled(service, going_on(group(), rows)))
        await until(service, lambda: core_of(service).waiting == 3)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(service, lambda: core_of(service).waiting == 0)
        assert len(core_of(service).parked) == 0


async def test_the_next_turn_goes_on_when_the_call_that_sampled_the_one_before_ends(
    start: Serve, environment: PlayedEnvironment
) -> None:
    """Members of a group finish one after the other, and each goes on at once: in a call of its own."""
    async with start() as service, asyncio.timeout(60):
        prompts = group()
        stream: Any = service.generate(prompts)
        first = await anext(stream)
        await service.pause()
        later = asyncio.create_task(sampled(service, going_on(prompts, environment.step(service, first, " no"))))
        await until(service, lambda: all(row.name in service._streams for row in first))
        await stream.aclose()
        await service.resume()
        assert {row.turns for row in await later} == {2}


async def test_each_turn_knows_whether_its_prompt_ended_inside_thoughts(
    start: Serve, environment: PlayedEnvironment
) -> None:
    async with start() as service:
        prompts = group("go left: <think>", members=(0,))
        (first,) = rows = await sampled(service, prompts)
        (second,) = rows = await sampled(service, going_on(prompts, environment.step(service, rows, " so?")))
        (third,) = rows = await sampled(service, going_on(prompts, environment.step(service, rows, " <think>")))
        assert [row.opened for row in (first, second, third)] == [True, False, True]
        transcript = json.loads(bytes(columns_of(service, third)[5]))
        assert [bool(each.get("opened")) for each in transcript[::2]] == [True, False, True]
