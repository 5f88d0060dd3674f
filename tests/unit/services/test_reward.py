"""The reward service with real children."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from asyncrl.config.schema import Config
from asyncrl.config.sections.evaluate_config import EvaluateConfig
from asyncrl.environments.transcript import transcript_column
from asyncrl.errors import ConfigError, RewardError
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.messages import Score
from asyncrl.services.reward import RewardService
from tests.unit.services.conftest import Serve, put_row, store_read_by

FUNCTIONS = """
import threading

def right(sample):
    return float(sample.text == sample.row["answer"])

def details(sample):
    return {"tokens": sample.tokens, "cut": float(sample.finish == "length")}

def fussy(sample):
    if sample.text == "hang":
        threading.Event().wait()
    return None if sample.text == "none" else 1.0

def short(samples):
    return [1.0] * (len(samples) - 1)

def share(samples):
    longest = max(len(sample.text) for sample in samples)
    return [len(sample.text) / longest for sample in samples]
"""
ROW = {"prompt": "reverse abc:", "answer": "cba"}


class Bench:
    """A running service and a store to put samples into."""

    def __init__(self, service: RewardService, store: RowStore) -> None:
        self.service = service
        self.store = store

    def ref(self, text: str, member: int = 0, group: int = 4, finish: str = "stop") -> RowRef:
        return put_row(self.store, text=text, member=member, group=group, finish=finish)

    async def score(self, text: str, member: int = 0, group: int = 4, finish: str = "stop") -> Score:
        (score,) = await self.service.score(BatchRef((self.ref(text, member, group, finish),)), ROW)
        return score


def config(*functions: Any, members: int = 3, **reward: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"name": "m"},
            "task": {"prompts": "rows.jsonl", "samples_per_prompt": members},
            "reward": {"functions": functions, **reward},
            "evaluate": {"samples": 1},
        }
    )


Serving = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
def serving(serve: Serve) -> Serving:
    @asynccontextmanager
    async def benched(settings: Config, service: str = "reward") -> AsyncIterator[Bench]:
        async with serve(RewardService, service, settings) as started:
            yield Bench(started, store_read_by(started))

    return benched


async def test_the_weighted_sum_of_all_functions(mine: str, serving: Serving) -> None:
    functions = ({"use": f"{mine}:right", "weight": 2.0}, {"use": f"{mine}:details", "weight": -0.1}, "exact_match")
    async with serving(config(*functions)) as bench:
        assert await bench.score("cba", finish="length") == Score(
            pytest.approx(2.0 - 0.4 + 1.0),  # type: ignore[arg-type]
            {"right": 1.0, "details/tokens": 3.0, "details/cut": 1.0, "exact_match": 1.0},
        )
        assert (await bench.score("abc")).terms["right"] == 0.0


async def test_functions_are_told_the_tokens_that_an_environment_wrote(serving: Serving) -> None:
    options = {"maximum": 10, "slack": 4}
    units = ("tokens", "row_tokens")
    lengths = ({"use": "length", "name": unit, "options": options | {"unit": unit}} for unit in units)
    async with serving(config(*lengths)) as bench:
        (score,) = await bench.service.score(BatchRef((bench.ref("abc")._replace(given=5),)), ROW)
        assert score.terms == {"tokens": 0.0, "row_tokens": -0.5}


async def test_a_function_is_told_that_the_prompt_opened_the_thoughts(mine: str, serving: Serving) -> None:
    async with serving(config("exact_match", f"{mine}:right")) as bench:
        for text, expected in {"cba": 0.0, "abc?</think>cba": 1.0}.items():
            ref = bench.ref(text)._replace(opened=True)
            (score,) = await bench.service.score(BatchRef((ref,)), ROW)
            assert score.terms == {"exact_match": expected, "right": float(text == "cba")}


@pytest.mark.parametrize(("on_error", "reward", "known"), [("zero", 1.0, False), ("ignore", None, True)])
async def test_an_episode_whose_environment_failed_says_why(
    serving: Serving, on_error: str, reward: float | None, known: bool
) -> None:
    """Such an error is none of a reward function, and in no log of theirs."""
    cause = "environment my.py:Game on member 2 of group 4: `step` raised KeyError: 'a'\n  File ..."
    said = {"role": "assistant", "content": "cba"} | ({"info": {"error": cause}} if known else {})
    settings = config("exact_match").model_dump() | {"environment": {"use": "my.py:Game", "on_error": on_error}}
    async with serving(Config.model_validate(settings)) as bench:
        columns = {"text": "cba", "transcript": transcript_column([said]), "turn_rewards": np.zeros(1, np.float32)}
        ref = put_row(bench.store, member=2, finish="environment", **columns)
        (score,) = await bench.service.score(BatchRef((ref,)), ROW)
        assert score.reward == reward
        assert score.error == (cause if known else "the environment failed on member 2 of group 4")
        assert not bench.service.counters.get("failed")
        (score,) = await bench.service.score(BatchRef((ref._replace(finish="stop"),)), ROW)
        assert (score.reward, score.error) == (1.0, "")


async def test_an_answer_at_which_a_template_hangs_has_0_and_is_told_once(serving: Serving) -> None:
    slow = {"use": "regex_format", "options": {"pattern": "(x+x+)+y"}}
    with capture_logs() as logs:
        async with serving(config(slow, deadline=1.5)) as bench:
            refs = [bench.ref(text, member) for member, text in enumerate(("x" * 60, "xxy", "x" * 61))]
            scores = await bench.service.score(BatchRef(tuple(refs)), ROW)
    assert [(score.reward, score.terms) for score in scores] == [
        (0.0, {"regex_format": 0.0}),
        (1.0, {"regex_format": 1.0}),
        (0.0, {"regex_format": 0.0}),
    ]
    assert [bool(score.error) for score in scores] == [True, False, True]
    (told,) = [each for each in logs if each["event"] == "reward failed"]
    assert "reward function regex_format on member 0 of group 4: it hung: no answer within 1.5 s" in told["error"]


async def test_group_functions_wait_for_all_members_and_answer_each(mine: str, serving: Serving) -> None:
    functions = ("exact_match", {"use": f"{mine}:share", "group": True})
    async with serving(config(*functions)) as bench, asyncio.TaskGroup() as tasks:
        scores = [tasks.create_task(bench.score(text, member)) for member, text in enumerate(("abcd", "cba", "a"))]
    assert [score.result().terms for score in scores] == [
        {"exact_match": 0.0, "share": 1.0},
        {"exact_match": 1.0, "share": 0.75},
        {"exact_match": 0.0, "share": 0.25},
    ]


async def test_a_held_out_set_is_scored_by_its_own_functions_alone(mine: str, serving: Serving) -> None:
    own = [{"use": f"{mine}:share", "group": True, "weight": 2.0}, f"{mine}:fussy"]
    sets = {
        "plain": {"prompts": "p", "size": 4},
        "own": {"prompts": "o", "samples": 2, "temperature": 1.0, "functions": own},
    }
    settings = config("exact_match").model_copy(update={"evaluate": EvaluateConfig(size=2, sets=sets)})
    async with serving(settings) as bench:
        in_training, unnamed, plain = [await bench.score("cba", group=group) for group in (4, -2, -6)]
        async with asyncio.TaskGroup() as tasks:
            scores = [tasks.create_task(bench.score(text, member, -7)) for member, text in enumerate(("abcd", "cb"))]
        failing = [asyncio.ensure_future(bench.score("none", member, -8)) for member in range(2)]
        failed = await asyncio.gather(*failing, return_exceptions=True)
    assert in_training.terms == unnamed.terms == plain.terms == {"exact_match": 1.0}
    assert [(score.result().reward, score.result().terms) for score in scores] == [
        (3.0, {"share": 1.0, "fussy": 1.0}),
        (2.0, {"share": 0.5, "fussy": 1.0}),
    ]
    assert all(isinstance(error, RewardError) and "reward.on_error" in str(error) for error in failed)


async def test_errors_name_whole_groups_and_held_out_prompts(mine: str, serving: Serving) -> None:
    functions = ("exact_match", {"use": f"{mine}:short", "group": True})
    sets = {"hard": {"prompts": "h"}}
    settings = config(*functions, on_error="zero")
    held_out = EvaluateConfig(prompts="p", size=40, sets=sets)
    unnamed = EvaluateConfig(size=40)
    async with serving(settings.model_copy(update={"evaluate": held_out})) as bench:
        refs = BatchRef(tuple(bench.ref("cba", member) for member in range(3)))
        group = (await bench.service.score(refs, ROW))[2].error
        errors = [group, *[(await bench.score("cba", group=each)).error for each in (-34, -43)]]
    async with serving(settings.model_copy(update={"evaluate": unnamed})) as bench:
        errors.append((await bench.score("cba", group=-34)).error)
    places = [error.removeprefix(f"reward function {mine}:short on ").partition(":")[0] for error in errors]
    assert places == [
        "the 3 samples of group 4",
        "the only sample of held-out prompt 33",
        "the only sample of held-out prompt 2 of evaluate.sets.hard",
        "the only sample of prompt 33",
    ]


async def test_fail_raises_after_the_first_sample_that_hangs(mine: str, serving: Serving) -> None:
    async with serving(config(f"{mine}:fussy", deadline=0.5)) as bench:
        says = r"mine\.py:fussy on member 0 of group 4: it hung: no answer within 0\.5 s"
        with pytest.raises(RewardError, match=says):
            await bench.service.score(BatchRef(tuple(bench.ref("hang", member) for member in range(3))), ROW)
        assert bench.service.finished == 1
        assert bench.service.context.clock.spent()[1]["busy"] >= 0.5, "while children work"


@pytest.mark.parametrize(("on_error", "reward", "text"), [("zero", 1.0, "none"), ("ignore", None, "hang")])
async def test_the_run_goes_on_where_the_config_says_so(
    mine: str, on_error: str, reward: float | None, text: str, serving: Serving
) -> None:
    settings = config(f"{mine}:fussy", f"{mine}:details", deadline=0.5, on_error=on_error)
    async with serving(settings) as bench:
        expected = None if reward is None else 4.0
        score = await bench.score(text)
        assert score.reward == expected
        assert f"{mine}:fussy on member 0 of group 4: it " in score.error
        assert bench.service.counters["failed"] == 1
        assert (await bench.score("fine")).reward == 5.0
        assert bench.service.counters == {"failed": 1, "samples": 2}


def costs(*functions: Any, **cost: Any) -> Config:
    algorithm = {"preset": "safe_rlhf"}
    given = config("exact_match").model_dump() | {"algorithm": algorithm}
    return Config.model_validate(given | {"cost": {"functions": functions, "limit": 0.5, **cost}})


async def test_the_cost_service_judges_by_its_own_section(mine: str, serving: Serving) -> None:
    settings = costs({"use": f"{mine}:details", "weight": 0.5}, on_error="zero")
    async with serving(settings, service="cost") as bench:
        assert await bench.score("abc", finish="length") == Score(2.0, {"details/tokens": 3.0, "details/cut": 1.0})
    async with serving(settings) as bench:
        assert (await bench.score("abc")).terms == {"exact_match": 0.0}


async def test_what_a_cost_function_does_wrong_is_told_by_the_name_of_its_section(mine: str, serving: Serving) -> None:
    async with serving(costs(f"{mine}:fussy"), service="cost") as bench:
        with pytest.raises(
            RewardError,
            match=r"(?s)cost function .*mine\.py:fussy on member 2 of group 4: it returned None.*cost\.on_error",
        ):
            await bench.score("none", member=2)
    with pytest.raises(ExceptionGroup) as raised:
        async with serving(costs(f"{mine}:rihgt"), service="cost"):
            pass
    assert raised.group_contains(ConfigError, match=r"^cost\.functions: .* has no rihgt; did you mean right")


def test_the_worker_needs_no_torch() -> None:
    code = "import asyncrl.services.reward, sys; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60, env=environment).returncode == 0


@pytest.mark.parametrize("on_error", ["fail", "ignore"])
async def test_a_row_that_a_template_cannot_score_costs_its_group_and_not_the_run(
    serving: Serving, on_error: str
) -> None:
    row = {"prompt": "say", "answer": "x+1"}
    async with serving(config("numeric", on_error=on_error)) as bench:
        (score,) = await bench.service.score(BatchRef((bench.ref("7"),)), row)
        assert (score.reward, score.terms, score.bad_row) == (None, {}, True)
        assert "numeric on member 0 of group 4: the row's answer holds no number" in score.error
        (good,) = await bench.service.score(BatchRef((bench.ref("7", group=5),)), {"prompt": "say", "answer": "7"})
        assert good == Score(1.0, {"numeric": 1.0})
