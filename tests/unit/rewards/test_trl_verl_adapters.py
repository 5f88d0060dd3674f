import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import pytest

from asyncrl.config.user_code import name_of
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards import Sample, from_trl, from_verl
from asyncrl.rewards.execution.function_call import attempt, call
from asyncrl.rewards.execution.scoring import score_of
from asyncrl.rewards.functions import FunctionSpec, overlapping
from asyncrl.rewards.sample import FunctionResult
from asyncrl.rewards.trl_verl_adapters import takes_token_ids
from tests import golden

MESSAGES = [{"role": "user", "content": "hi"}]


def sample(text: str, member: int = 0, prompt: Any = "hi", **row: Any) -> Sample:
    return Sample(prompt, text, {"prompt": prompt, **row}, group=0, member=member, finish="stop", tokens=1)


def test_trl_gets_lists() -> None:
    seen: dict[str, Any] = {}

    def f(prompts: list[str], completions: list[str], answer: list[str], **rest: Any) -> list[float]:
        seen.update(prompts=prompts, other=rest.get("other"))
        return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

    assert from_trl(f)(sample("4", answer="4", other=1)) == 1.0
    assert seen == {"prompts": ["hi"], "other": [1]}
    assert from_trl(f)([sample("4", answer="4"), sample("5", 1, answer="4")]) == [1.0, 0.0]


def test_trl_functions_may_name_only_what_they_need() -> None:
    assert from_trl(lambda completions: [len(text) for text in completions])(sample("four", answer="x")) == 4


def scored(f: Any, *samples: Sample) -> list[FunctionResult]:
    return asyncio.run(call(from_trl(f), list(samples), group=True))


def test_trl_gets_the_ids_of_sampled_tokens_and_the_state_of_training() -> None:
    seen: dict[str, Any] = {}

    def f(prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, **rest: Any) -> list[float]:
        seen.update(ids=completion_ids, at=(trainer_state.global_step, trainer_state.max_steps), rest=sorted(rest))
        return [1.0 for _ in completions]

    row = {"completion_ids": "a column", "trainer_state": "x", "completion": "y", "answer": "4"}
    samples = [replace(sample("4", **row), token_ids=[1, 2], version=at, steps=9) for at in (3, 5)]
    assert [result.value for result in scored(f, *samples)] == [1.0, 1.0]
    assert seen == {"ids": [[1, 2], [1, 2]], "at": (5, 9), "rest": ["answer", "log_extra", "log_metric"]}


def test_a_state_says_what_it_has() -> None:
    def f(completions: Any, trainer_state: Any) -> list[float]:
        return [trainer_state.epoch]

    (result,) = asyncio.run(attempt(from_trl(f), [sample("x")], False, 1.0))
    golden.says(result.reason, "trainer_state", "global_step")


def test_what_a_trl_function_logs_becomes_terms_beside_the_reward(capsys: pytest.CaptureFixture[str]) -> None:
    def f(completions: Any, log_metric: Any, log_extra: Any, **rest: Any) -> list[float | None]:
        log_metric("accuracy", 0.0)
        log_metric("accuracy", True)
        log_extra("length", [len(text) for text in completions])
        log_extra("verdict", ["good", None])
        return [1.0, None]

    first, second = scored(f, sample("four"), sample("no", 1))
    assert first == FunctionResult(1.0, logged={"length": 4.0, "accuracy": 0.5})
    assert (second.value, second.logged) == (None, {"length": 2.0, "accuracy": 0.5})
    assert capsys.readouterr().out == "verdict: ['good', None]\n"
    score = score_of(sample("four"), [FunctionSpec("trl:f.py:f", "f", weight=0.5)], [first], "fail")
    assert (score.reward, score.terms) == (0.5, {"f": 1.0, "f/length": 4.0, "f/accuracy": 0.5})


@pytest.mark.parametrize(
    "log",
    [
        lambda metric, extra: metric("x", "high"),
        lambda metric, extra: metric("x", float("nan")),
        lambda metric, extra: metric("x", [1.0, 2.0]),
        lambda metric, extra: extra("x", [1.0, 2.0]),
        lambda metric, extra: extra("x", [float("inf")]),
    ],
)
def test_what_cannot_be_logged_is_a_mistake_of_the_function(log: Any) -> None:
    def f(completions: Any, log_metric: Any, log_extra: Any) -> list[float]:
        log(log_metric, log_extra)
        return [1.0]

    (result,) = asyncio.run(attempt(from_trl(f), [sample("x")], False, 1.0))
    golden.says(result.reason)


def test_calls_of_coroutine_functions_log_apart() -> None:
    async def f(completions: Any, log_metric: Any, **rest: Any) -> list[float]:
        log_metric("size", len(completions[0]))
        await asyncio.sleep(0)
        return [1.0]

    async def both() -> list[Any]:
        adapted = from_trl(f)
        return await asyncio.gather(*(adapted(sample(text)) for text in ("a", "four")))

    assert [logged.terms for logged in asyncio.run(both())] == [{"size": 1.0}, {"size": 4.0}]


def test_functions_of_trl_are_given_token_ids() -> None:
    assert takes_token_ids(from_trl(lambda completions, **rest: [1.0]))
    assert takes_token_ids("trl:mine.py:f")
    assert not takes_token_ids("verl:mine.py:f")
    assert not takes_token_ids(from_verl(compute_score))


def test_a_trl_function_that_needs_what_only_trls_trainer_has_is_refused_before_any_sample() -> None:
    def f(prompts: Any, completions: Any, completion_ids: Any, environments: Any, **rest: Any) -> list[float]:
        return [1.0]

    with golden.raises(ConfigError, match="TRL.*environments=None"):
        from_trl(f)
    from_trl(partial(f, environments=None))


def test_a_column_that_a_trl_function_needs_is_named_when_rows_lack_it() -> None:
    def f(completions: list[str], anser: list[str]) -> list[float]:
        return [1.0]

    with golden.raises(RewardError, match="mean answer"):
        from_trl(f)(sample("4", answer="4"))


def test_trl_completions_are_messages_where_prompts_are() -> None:
    def f(completions: list[list[dict[str, str]]]) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    assert from_trl(f)(sample("four", prompt=MESSAGES)) == 4


def test_trl_none_stays_none_and_a_wrong_count_is_an_error() -> None:
    assert from_trl(lambda completions: [None])(sample("x")) is None
    with golden.raises(RewardError, match="returned 2"):
        from_trl(lambda completions: [1.0, 2.0])(sample("x"))


async def test_coroutine_functions_stay_such() -> None:
    async def f(completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]

    adapted = from_trl(f)
    assert overlapping(adapted)
    assert not overlapping(from_trl(lambda completions: [1.0]))
    assert await adapted(sample("x")) == 1.0


VERL_ROW = {"data_source": "gsm8k", "reward_model": {"ground_truth": "72"}, "extra_info": {"index": 5}}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    right = solution_str == ground_truth
    return {"score": float(right), "acc": right, "seen": (data_source, extra_info)}


def test_verl_gets_its_four_arguments_and_score_counts() -> None:
    assert from_verl(compute_score)(sample("72", **VERL_ROW)) == 1.0
    assert from_verl(compute_score)(sample("73", **VERL_ROW)) == 0.0
    assert from_verl(lambda **arguments: len(arguments))(sample("73", **VERL_ROW)) == 4


def test_verl_needs_its_columns() -> None:
    with golden.raises(RewardError, match="columns data_source.*reward_model"):
        from_verl(compute_score)(sample("72"))


@pytest.mark.parametrize("written", [json.dumps, repr, lambda row: json.dumps(json.dumps(row))])
def test_verl_gets_tables_that_a_file_without_tables_holds_as_text(written: Callable[[Any], str]) -> None:
    row = {**VERL_ROW, "reward_model": written(VERL_ROW["reward_model"]), "extra_info": written({"index": 3})}
    assert from_verl(compute_score)(sample("72", **row)) == 1.0
    assert from_verl(lambda **given: given["extra_info"]["index"])(sample("72", **row)) == 3


@pytest.mark.parametrize("model", ["rule", '{"ground_truth": ', None, "[1]"])
def test_verl_is_told_that_its_table_is_none(model: Any) -> None:
    with golden.raises(RewardError, match="reward_model.*ground_truth"):
        from_verl(compute_score)(sample("72", **{**VERL_ROW, "reward_model": model}))


class Judge:
    def __call__(self, completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]


async def waits(completions: list[str]) -> list[float]:
    return [1.0 for _ in completions]


def half(completions: list[str], share: float = 0.5) -> list[float]:
    return [share for _ in completions]


@pytest.mark.parametrize(
    ("adapted", "name"),
    [
        (from_trl(half), "half"),
        (from_trl(waits), "waits"),
        (from_verl(compute_score), "compute_score"),
        (from_trl(partial(half, share=0.1)), "half"),
        (from_trl(Judge()), "Judge"),
        (from_trl(lambda completions: [1.0]), "lambda"),
    ],
)
def test_an_adapted_function_has_the_name_of_the_other(adapted: Callable[..., Any], name: str) -> None:
    assert name_of(adapted) == name
    assert len(signature(adapted).parameters) == 1, "it takes a sample, and not what the other takes"


def test_an_adapted_function_is_of_the_module_of_the_other() -> None:
    assert (from_trl(half).__module__, from_verl(compute_score).__qualname__) == (__name__, "compute_score")


@pytest.mark.parametrize("returned", [0.5, None, True, "0.5", {"score": 1.0}, b"1"])
def test_trl_returns_a_list(returned: Any) -> None:
    def mine(completions: list[str]) -> Any:
        return returned

    with golden.raises(RewardError, match=f"{re.escape(repr(returned))}.*TRL"):
        from_trl(mine)(sample("a"))


@pytest.mark.parametrize("returned", [{"acc": True}, {}, {"Score": 1.0}, {"reward": 1}])
def test_of_the_dict_of_verl_the_score_is_needed(returned: Any) -> None:
    def mine(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any) -> Any:
        return returned

    with golden.raises(RewardError, match=f"{re.escape(repr(returned))}"):
        from_verl(mine)(sample("a", **VERL_ROW))


def test_what_has_to_be_given_by_place_is_refused() -> None:
    def first(prompts: list[str], /, completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]

    def second(data_source: Any, solution_str: Any, /, ground_truth: Any, extra_info: Any) -> float:
        return 1.0

    with golden.raises(ConfigError):
        from_trl(first)
    with golden.raises(ConfigError, match="data_source, solution_str"):
        from_verl(second)
