from functools import partial
from typing import Any

import pytest

from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards import Sample, from_trl, from_verl
from asyncrl.rewards.functions import overlapping

MESSAGES = [{"role": "user", "content": "hi"}]


def sample(text: str, member: int = 0, prompt: Any = "hi", **row: Any) -> Sample:
    return Sample(prompt, text, {"prompt": prompt, **row}, group=0, member=member, finish="stop", tokens=1)


def test_trl_gets_lists() -> None:
    seen: dict[str, Any] = {}

    def f(prompts: list[str], completions: list[str], answer: list[str], **rest: Any) -> list[float]:
        seen.update(prompts=prompts, rest=rest)
        return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

    assert from_trl(f)(sample("4", answer="4", other=1)) == 1.0
    assert seen == {"prompts": ["hi"], "rest": {"other": [1]}}
    assert from_trl(f)([sample("4", answer="4"), sample("5", 1, answer="4")]) == [1.0, 0.0]


def test_trl_functions_may_name_only_what_they_need() -> None:
    assert from_trl(lambda completions: [len(text) for text in completions])(sample("four", answer="x")) == 4


def test_what_only_trls_trainer_has_is_left_to_defaults() -> None:
    seen: dict[str, Any] = {}

    def f(completions: list[str], completion_ids: Any = None, *, log_metric: Any = None, **rest: Any) -> list[float]:
        seen.update(ids=completion_ids, log=log_metric, rest=sorted(rest))
        return [1.0]

    assert from_trl(f)(sample("4", completion_ids=[1], trainer_state="x", completion="y", answer="4")) == 1.0
    assert seen == {"ids": None, "log": None, "rest": ["answer", "prompts"]}


def test_a_trl_function_that_needs_more_is_refused_before_any_sample() -> None:
    def f(prompts: Any, completions: Any, completion_ids: Any, *, log_extra: Any, **rest: Any) -> list[float]:
        return [1.0]

    told = r"^f takes completion_ids and log_extra, which TRL .* give it a default: completion_ids=None$"
    with pytest.raises(ConfigError, match=told):
        from_trl(f)
    with pytest.raises(ConfigError, match=r"^f takes completion_ids, "):
        from_trl(partial(f, log_extra=print))


def test_a_column_that_a_trl_function_needs_is_named_when_rows_lack_it() -> None:
    def f(completions: list[str], anser: list[str]) -> list[float]:
        return [1.0]

    with pytest.raises(RewardError, match=r"^it takes anser, and the row has no such column; did you mean answer"):
        from_trl(f)(sample("4", answer="4"))


def test_trl_completions_are_messages_where_prompts_are() -> None:
    def f(completions: list[list[dict[str, str]]]) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    assert from_trl(f)(sample("four", prompt=MESSAGES)) == 4


def test_trl_none_stays_none_and_a_wrong_count_is_an_error() -> None:
    assert from_trl(lambda completions: [None])(sample("x")) is None
    with pytest.raises(RewardError, match="given one completion and returned 2"):
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
    with pytest.raises(RewardError, match=r"need the columns data_source and reward_model; found are \['prompt'\]"):
        from_verl(compute_score)(sample("72"))
