"""The environment service with real children: rows that it stores, replays, limits and failures."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.schema import Config
from asyncrl.environments.episode_pool import Played
from asyncrl.environments.transcript import failure_in
from asyncrl.errors import EnvironmentFailed, LostRows, Retryable, TaskError
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.seeds import group_seed
from asyncrl.services.environment import EnvironmentService, EpisodeState, new_seconds
from tests.unit.services.conftest import Serve

ENVIRONMENTS = r"""
import asyncio, itertools, os, pathlib
from asyncrl import Observation

class Counts:
    def __init__(self, random_opening=False, random_answers=False):
        self.opening, self.answers = random_opening, random_answers
    async def reset(self, row, seed):
        self.total = row["start"]
        chance = os.urandom(4).hex() if self.opening else seed
        return Observation(f"from {row['start']} with {chance}")
    async def step(self, message):
        if message == "raise":
            raise KeyError("nothing here")
        self.total += 1
        chance = os.urandom(4).hex() if self.answers else ""
        note = {"process": os.getpid()} if message == "note" else {}
        if message in ("end", "note and end"):
            return Observation("", self.total, True, {"said": message} if message != "end" else {})
        return Observation(f"{message} {self.total}{chance}", self.total, message == "stop", note)

class Opens(Counts):
    async def reset(self, row, seed):
        return Observation(row["prompt"])

class Slow(Counts):
    async def step(self, message):
        await asyncio.sleep(0.2)
        return await super().step(message)
"""
ROW = {"prompt": "begin", "start": 5}
MakeService = Callable[..., AbstractAsyncContextManager[EnvironmentService]]


@pytest.fixture
def generated() -> RowStore:
    """The rows of a generator."""
    return RowStore.private("inproc://generation", 64, 4096)


def said(
    store: RowStore, *turns: str, member: int = 0, before: list[dict[str, str]] | None = None, attempt: int = 0
) -> RowRef:
    """Stores the row of a sample whose newest turn is the last of these: before, the transcript up to it."""
    transcript = [*(before or []), {"role": "assistant", "content": turns[-1]}]
    columns = {
        "prompt_ids": np.array([1, 2], np.int32),
        "response_ids": np.arange(3 * len(turns), dtype=np.int32),
        "logprobs": np.zeros(2 * len(turns), np.float32),
        "versions": np.zeros(2 * len(turns), np.int32),
        "spans": np.array([2, 1] * len(turns), np.int32),
        "text": np.frombuffer(turns[-1].encode(), np.uint8),
        "transcript": np.frombuffer(json.dumps(transcript).encode(), np.uint8),
    }
    place = store.put(columns)
    tokens = 2 * len(turns)
    given = len(turns)
    return RowRef(3, member, attempt, 0, 2, tokens, 0, 0, "stop", (place,), turns=len(turns), given=given)


@pytest.fixture
def service(tmp_path: Path, generated: RowStore, serve: Serve) -> MakeService:
    file = tmp_path / "environments.py"
    file.write_text(ENVIRONMENTS)

    def make(name: str = "Counts", system: str = "", **settings: Any) -> Any:
        section = {"use": f"{file}:{name}", "max_tokens": 64, "max_turns": 4, **settings}
        task = {"prompts": "none", "system": system}
        plain = {"model": {"name": "tiny"}, "task": task, "generation": {"max_new_tokens": 8}}
        config = Config.model_validate({**plain, "environment": section})
        return serve(EnvironmentService, "environment", config, source=generated)

    return make


def prompts(*members: int, attempt: int = 0) -> PromptGroup:
    return PromptGroup(3, attempt, 0, "begin", members, group_seed(0, 3), 0, 1.0, 8, 30.0)


def stored(service: EnvironmentService, row: RowRef) -> dict[str, Any]:
    assert service.rows is not None
    (place,) = row.places
    found = dict(zip(place.columns, service.rows.read(place, place.columns), strict=True))
    return {**found, "transcript": json.loads(bytes(found["transcript"])), "rewards": found["turn_rewards"].tolist()}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        for _ in iter(condition, True):
            await asyncio.sleep(0)


async def step(service: EnvironmentService, *rows: RowRef) -> list[RowRef]:
    return list(await service.step(BatchRef(rows), ROW))


async def test_a_row_comes_back_with_all_columns_and_the_answer(service: MakeService, generated: RowStore) -> None:
    async with service() as environment:
        opening = await environment.reset(prompts(0, 1), ROW)
        assert opening.prompt == f"from 5 with {group_seed(0, 3)}"
        (first,) = await step(environment, said(generated, "a"))
        found = stored(environment, first)
        assert found["response_ids"].tolist() == [0, 1, 2]
        assert found["transcript"] == [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a 6"}]
        assert (first.finish, first.turns, found["rewards"]) == ("", 1, [6.0])
        (second,) = await step(environment, said(generated, "a", "stop", before=found["transcript"]))
        assert (second.finish, second.turns) == ("stop", 2)
        assert stored(environment, second)["rewards"] == [6.0, 7.0]
        with pytest.raises(LostRows):
            stored(environment, first)  # Freed with the next turn.
        await environment.release([(3, 0, 0), (3, 1, 0)], 0)
        assert environment.rows is not None
        assert environment.rows.used == 0


async def test_the_system_message_of_the_task_goes_before_every_opening(service: MakeService) -> None:
    asked = {"role": "user", "content": "hi"}
    async with service("Opens", system="Be brief.") as environment:
        for attempt, prompt in enumerate(("hi", [asked])):
            opening = await environment.reset(prompts(0, attempt=attempt), ROW | {"prompt": prompt})
            assert opening.prompt == [{"role": "system", "content": "Be brief."}, asked]
        with pytest.raises(TaskError, match=r"Opens began group 3: .* message of its own; remove task\.system"):
            await environment.reset(
                prompts(0, attempt=2), ROW | {"prompt": [{"role": "system", "content": "a"}, asked]}
            )
    async with service("Opens") as environment:
        assert (await environment.reset(prompts(0), ROW | {"prompt": "hi"})).prompt == "hi"


async def test_an_episode_that_ends_without_a_word_has_no_empty_message(
    service: MakeService, generated: RowStore
) -> None:
    async with service() as environment:
        silent, noted = await step(environment, said(generated, "end"), said(generated, "note and end", member=1))
        policy = {"role": "assistant", "content": "end"}
        assert stored(environment, silent)["transcript"] == [policy]
        info = {"said": "note and end"}
        assert stored(environment, noted)["transcript"] == [{**policy, "content": "note and end", "info": info}]
        assert [row.finish for row in (silent, noted)] == ["stop", "stop"]


async def test_calls_of_tools_count_once_and_not_in_an_evaluation(
    service: MakeService, generated: RowStore, tmp_path: Path
) -> None:
    (tmp_path / "tools.py").write_text("def double(x: int) -> int:\n    return 2 * x\n")
    call = '<tool_call>{"name": "double", "arguments": {"x": 4}}</tool_call>'
    async with service(use="tools", options={"functions": [f"{tmp_path}/tools.py:double"]}) as environment:
        row = said(generated, call)
        (first,) = await step(environment, row)
        await step(environment, row)
        before = stored(environment, first)["transcript"]
        environment._pool.forget([first.name])  # Its child died, and the first turn is played again.
        await step(environment, said(generated, call, f"{call}<tool_call>", before=before))
        await step(environment, said(generated, call)._replace(group=-1))
        counted = {name: count for name, count in environment.counters.items() if name.startswith("environment/")}
        calls = {"environment/tool_calls": 3.0, "environment/failed_tool_calls": 1.0}
        assert counted == {**calls, "environment/failed_episodes": 0.0}
        assert environment.counters["replayed"] == 1


async def test_a_repeated_turn_gets_the_stored_row(service: MakeService, generated: RowStore) -> None:
    async with service("Slow") as environment:
        row = said(generated, "a")
        (first,), (beside,) = await asyncio.gather(step(environment, row), step(environment, row))
        (again,) = await step(environment, row)
        assert first == beside == again
        assert stored(environment, again)["rewards"] == [6.0]


async def test_a_turn_whose_caller_went_away_does_not_answer_the_next_one(
    service: MakeService, generated: RowStore
) -> None:
    async with service("Slow") as environment:
        given_up = asyncio.create_task(step(environment, row := said(generated, "a")))
        rows = environment.rows
        assert rows is not None
        await until(lambda: environment.queued == 1)
        given_up.cancel()
        await until(lambda: environment.queued == 0 and rows.used == 1)
        (first,) = await step(environment, row)
        before = stored(environment, first)["transcript"]
        (second,) = await step(environment, said(generated, "a", "b", before=before))
        assert (second.turns, stored(environment, second)["rewards"]) == (2, [6.0, 7.0])


def test_turns_that_are_played_again_cost_the_episode_no_seconds() -> None:
    played = Played({turn: {"seconds": float(2**turn)} for turn in range(4)})
    assert new_seconds(EpisodeState((3, 0, 0)), played) == 1 + 2 + 4 + 8, "a worker that died counted none here"
    assert new_seconds(EpisodeState((3, 0, 0), rewards=[0.0, 0.0]), played) == 8


async def test_an_unknown_episode_is_played_again_from_its_transcript(
    service: MakeService, generated: RowStore
) -> None:
    before = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a 6"}]
    async with service() as environment:
        (row,) = await step(environment, said(generated, "a", "b", before=before))
        assert stored(environment, row)["rewards"] == [6.0, 7.0]
        assert environment.counters["replayed"] == 1
        before = [
            {"role": "assistant", "content": "note"},
            {"role": "user", "content": "note 6", "info": {"process": 1}},
        ]
        (row,) = await step(environment, said(generated, "note", "b", before=before, member=2))
        assert row.turns == 2, "notes may differ"
        before = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a 7"}]
        with pytest.raises(Retryable, match=r"answered turn 1 with .*'a 6'.* in place of .*'a 7'"):
            await step(environment, said(generated, "a", "b", before=before, member=1))


async def test_a_new_attempt_goes_on_with_the_episode_that_lives(service: MakeService, generated: RowStore) -> None:
    async with service(options={"random_answers": True}) as environment:  # Playing it again would answer otherwise.
        await environment.reset(prompts(0), ROW)
        (first,) = await step(environment, said(generated, "a"))
        await environment.reset(prompts(0, attempt=1), ROW)
        before = stored(environment, first)["transcript"]
        (second,) = await step(environment, said(generated, "a", "b", before=before, attempt=1))
        assert stored(environment, second)["rewards"] == [6.0, 7.0]
        assert environment.counters["replayed"] == 0
        await environment.release([(3, 0, 1)], 0)
        assert environment.rows is not None
        assert environment.rows.used == 0
        assert not environment._pool._homes


async def test_the_seconds_of_an_episode_are_those_of_all_its_turns(service: MakeService, generated: RowStore) -> None:
    async with service("Slow") as environment:
        before: list[dict[str, str]] = []
        taken = 0.0
        for turns, attempt in ((1, 0), (2, 0), (3, 1)):
            (row,) = await step(environment, said(generated, *"abc"[:turns], before=before, attempt=attempt))
            before = stored(environment, row)["transcript"]
            state = environment._groups[3][row.name]
            assert state.seconds >= taken + 0.2, "each turn sleeps as long"
            taken = state.seconds


async def test_an_attempt_that_began_anew_does_not_go_on_with_another_history(
    service: MakeService, generated: RowStore
) -> None:
    """Its first turns were answered by another worker, which died."""
    async with service() as environment:
        await step(environment, said(generated, "a"))
        before = [{"role": "assistant", "content": "other"}, {"role": "user", "content": "other 6"}]
        (row,) = await step(environment, said(generated, "other", "b", before=before, attempt=1))
        assert stored(environment, row)["rewards"] == [6.0, 7.0]
        assert environment.counters["replayed"] == 1


async def test_no_attempt_goes_on_with_an_episode_that_came_out_otherwise(
    service: MakeService, generated: RowStore
) -> None:
    """A child has the turn that failed already: its answer would be taken for that of another attempt."""
    async with service(options={"random_answers": True}) as environment:
        (first,) = await step(environment, said(generated, "a"))
        before = stored(environment, first)["transcript"]
        environment._pool.forget([first.name])  # Its child died.
        for attempt, turn in enumerate(("b", "c")):
            with pytest.raises(Retryable, match="answered turn 1 with"):
                await step(environment, said(generated, "a", turn, before=before, attempt=attempt))


async def test_an_episode_that_is_answered_after_its_release_is_forgotten(
    service: MakeService, generated: RowStore
) -> None:
    async with service("Slow") as environment:
        answer = asyncio.create_task(step(environment, said(generated, "a")))
        await asyncio.sleep(0)
        assert environment._groups
        await environment.release([(3, 0, 0)], 0)
        await answer
        assert not environment._pool._homes


async def test_an_opening_that_the_seed_does_not_determine_is_an_error(
    service: MakeService, generated: RowStore
) -> None:
    async with service(options={"random_opening": True}) as environment:
        await environment.reset(prompts(0, 1), ROW)
        await step(environment, said(generated, "a"))
        with pytest.raises(EnvironmentFailed, match="gave two openings for one row and one seed"):
            await step(environment, said(generated, "a", member=1))


@pytest.mark.parametrize(
    ("settings", "finish", "changes"),
    [
        ({"max_turns": 1}, "turn_limit", {}),
        ({"max_tokens": 8}, "token_limit", {"tokens": 6, "given": 2}),
        ({"max_seconds": 0.01}, "time_limit", {}),
        ({}, "", {"finish": "length"}),
    ],
)
async def test_limits_have_finish_reasons(
    service: MakeService, generated: RowStore, settings: dict[str, Any], finish: str, changes: dict[str, Any]
) -> None:
    async with service("Slow", **settings) as environment:
        (row,) = await step(environment, said(generated, "a")._replace(**changes))
        assert row.finish == finish
        assert stored(environment, row)["rewards"] == [6.0]


async def test_a_failure_ends_the_run_by_default_and_names_the_row(service: MakeService, generated: RowStore) -> None:
    async with service() as environment:
        with pytest.raises(EnvironmentFailed) as raised:
            await step(environment, said(generated, "raise"))
        for part in ("on member 0 of group 3: `step` raised KeyError", "prompt of its row: 'begin'", "environments.py"):
            assert part in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "row", "message"),
    [
        ({}, {"start": 5}, r"`reset` raised MissingColumn: .*prompt(?s:.*)\nmend `reset`, or remove such rows from"),
        ({}, {"prompt": "", "start": 5}, "began group 3 with an empty text: return one from `reset`"),
        (
            {"use": "agent:python3 -c 'raise SystemExit(3)'"},
            {"start": 5},
            r"(?s)\nmend the program, or remove such rows from task.prompts; environment\.on_error = .* drops groups",
        ),
    ],
)
async def test_an_episode_that_does_not_begin_says_what_to_do(
    service: MakeService, settings: dict[str, Any], row: dict[str, Any], message: str
) -> None:
    async with service("Opens", **settings) as environment:
        with pytest.raises(EnvironmentFailed, match=message):
            await environment.reset(prompts(0), row)


@pytest.mark.parametrize("on_error", ["zero", "ignore"])
async def test_a_failure_ends_only_its_episode_where_that_is_asked_for(
    service: MakeService, generated: RowStore, on_error: str
) -> None:
    async with service(on_error=on_error) as environment:
        before = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a 6"}]
        bad, good = await step(
            environment, said(generated, "a", "raise", before=before), said(generated, "a", member=1)
        )
        assert (bad.finish, good.finish) == ("environment", "")
        assert stored(environment, bad)["rewards"] == [6.0, 0.0]
        assert environment.counters["failed"] == environment.counters["environment/failed_episodes"] == 1
        first, *lines = failure_in(stored(environment, bad)["transcript"]).splitlines()
        assert "on member 0 of group 3: `step` raised KeyError" in first
        assert len(lines) == 2
        assert "environments.py" in lines[0], "the first line of the user's code"
        assert failure_in(stored(environment, good)["transcript"]) == ""
