import asyncio
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import RewardError
from asyncrl.rewards import Sample
from asyncrl.rewards.execution.function_call import attempt, call, result_of
from asyncrl.rewards.sample import FunctionResult, with_columns
from tests import golden

SAMPLES = [Sample("p", text, {}, 0, member, "stop", 1) for member, text in enumerate("abc")]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.array(2), 2.0),
        (np.array([1.0]), 1.0),
        (np.array([[3]], np.int8), 3.0),
        (torch.tensor([1.0]), 1.0),
        (torch.tensor([[0.5]], dtype=torch.bfloat16, requires_grad=True), 0.5),
        ({"a": np.array([True])}, {"a": 1.0}),
        (Decimal("0.5"), 0.5),
        ({"a": 1, "b": np.int64(2)}, {"a": 1.0, "b": 2.0}),
    ],
)
def test_numbers_and_terms(value: Any, expected: Any) -> None:
    found = result_of(value).value
    assert found == expected
    assert type(found) in (float, dict)


@pytest.mark.parametrize(
    "value",
    [
        *(None, float("nan"), float("inf"), -1e31, "1.0", [1.0], {}, {"a": float("nan")}, {"a": None}),
        *(np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), np.array([]), np.array(["1"]), np.complex64(1 + 2j)),
        *(np.ma.array([1.0], mask=[True]), np.array([[1.0, 2.0]])),
    ],
)
@pytest.mark.trap("unscorable")
def test_what_is_no_reward(value: Any) -> None:
    found = result_of(value)
    assert found.value is None
    golden.says(found.reason)


async def test_a_group_is_judged_together_and_each_value_alone() -> None:
    def ranks(samples: list[Sample]) -> list[Any]:
        return [sample.member / len(samples) if sample.member else None for sample in samples]

    assert await call(ranks, SAMPLES, group=True) == [
        FunctionResult(reason="it returned None"),
        FunctionResult(1 / 3),
        FunctionResult(2 / 3),
    ]


@pytest.mark.parametrize("result", [[1.0, 2.0], 1.0, {"a": 1.0}, "abc"])
async def test_a_group_function_returns_as_many_rewards_as_samples(result: Any) -> None:
    with golden.raises(RewardError):
        await call(lambda samples: result, SAMPLES, group=True)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda samples: [1.0, 2.0], "it was given 3 samples and returned 2 rewards"),
        (lambda samples: None, "a group function returns a list of 3 rewards, this is None"),
        (lambda samples: samples[9], "it raised IndexError: list index out of range"),
        (lambda samples: samples.text, "remove that for a function of one sample"),
    ],
)
async def test_a_group_fails_together_where_no_sample_is_the_cause(function: Any, reason: str) -> None:
    found = await attempt(function, SAMPLES, True, 1.0)
    assert all(reason in each.reason for each in found)
    assert [each.failed_together for each in found] == [3, 3, 3]
    assert [each.failed_together for each in await attempt(lambda each: [None] * 3, SAMPLES, True, 1.0)] == [0, 0, 0]


@pytest.mark.parametrize("function", [len, lambda sample: [each.text for each in sample], lambda sample: sample[0]])
async def test_a_function_of_groups_that_gets_a_sample_is_told_the_key_to_write(function: Any) -> None:
    (found,) = await attempt(function, SAMPLES[:1], False, 1.0)
    assert found.reason.startswith("it raised TypeError: ")
    assert found.reason.endswith("; a function that takes all samples of a group needs group = true")
    assert found.failed_together == 0


async def test_other_type_errors_have_no_such_advice() -> None:
    def adds(sample: Any) -> Any:
        return sample.text + 1

    (found,) = await attempt(adds, SAMPLES[:1], False, 1.0)
    assert "group" not in found.reason


async def test_a_coroutine_that_hangs_reads_like_a_plain_function_and_says_where() -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    async def hangs(sample: Sample) -> float:
        await inner()
        return 1.0

    (result,) = await attempt(hangs, SAMPLES[:1], False, 0.01)
    line = inner.__code__.co_firstlineno + 1
    assert result == FunctionResult(reason=f"it hung: no answer within 0.01 s, waiting in {__file__}, line {line}")


async def test_a_column_that_is_not_there_is_told_with_those_that_are() -> None:
    sample = with_columns(Sample("p", "t", {"prompt": "p", "answr": "a"}, 0, 0, "stop", 1))

    async def asks(sample: Sample) -> Any:
        return sample.row["answer"]

    (result,) = await attempt(asks, [sample], False, 1.0)
    golden.says(result.reason, "column answer", "mean answr?")
    assert (sample.row.get("answer"), sample.row["answr"], "answer" in sample.row) == (None, "a", False)


async def test_a_function_by_token_returns_a_reward_for_each_token() -> None:
    sample = Sample("p", "abc", {}, 0, 0, "stop", 3)
    (found,) = await call(lambda sample: np.array([0.5, -0.25, 1.0], np.float32), [sample], False, by_token=True)
    assert found == FunctionResult(1.25, tokens=(0.5, -0.25, 1.0))
    both = await call(lambda samples: [[1, 2, 3], None], [sample, sample], True, by_token=True)
    assert both == [FunctionResult(6.0, tokens=(1.0, 2.0, 3.0)), FunctionResult(reason="it returned None")]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (0.5, "by_token = true"),
        ({"a": 1.0}, "by_token = true"),
        ([0.5, 1.0], "2 rewards"),
        ([0.5, math.nan, 1.0], "1"),
        ([0.5, "x", 1.0], "1"),
        ([0.5, 1e308, 1.0], "1"),
    ],
)
async def test_what_is_no_reward_of_tokens(value: Any, reason: str) -> None:
    (found,) = await call(lambda sample: value, [Sample("p", "abc", {}, 0, 0, "stop", 3)], False, by_token=True)
    assert found.value is None
    golden.says(found.reason, reason)
