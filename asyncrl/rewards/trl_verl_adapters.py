"""Adapts reward functions that were written for other libraries."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.config.user_code import name_of, suggestion
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.sample import Function, Sample

Parameters = Mapping[str, inspect.Parameter]

NOT_PASSED = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL passes besides prompts, completions and columns, and that only its own trainer has."""


def from_trl(function: Callable[..., Any]) -> Function:
    """Adapts a reward function of TRL's GRPOTrainer, `f(prompts, completions, **columns) -> list of float or None`, to
    single samples and, with `group = true`, whole groups; raises ConfigError if it needs an argument of NOT_PASSED.
    Completions are text, or one assistant message each where prompts are messages. Columns have a value a sample."""
    parameters = inspect.signature(function).parameters
    if missing := [name for name in _needed(parameters) if name in NOT_PASSED]:
        raise ConfigError(
            f"{name_of(function)} takes {' and '.join(missing)}, which TRL passes and asyncrl does not; "
            f"give it a default: {missing[0]}=None"
        )
    return _serving_both(function, lambda samples: _accepted(parameters, _trl_arguments(samples)), list)


def from_verl(function: Callable[..., Any]) -> Function:
    """Adapts a reward function of verl, `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, to
    single samples. Rows have verl's columns. Of a dict only `score` counts, as in verl."""
    return _serving_both(
        function, _verl_arguments, lambda result: [result["score"] if isinstance(result, dict) else result]
    )


def _serving_both(
    function: Callable[..., Any],
    arguments: Callable[[list[Sample]], dict[str, Any]],
    values: Callable[[Any], list[Any]],
) -> Function:
    """Makes a function of one sample or a group; it is a coroutine function exactly if `function` is one."""

    def call(samples: Sample | list[Sample]) -> Any:
        return function(**arguments(samples if isinstance(samples, list) else [samples]))

    def answer(samples: Sample | list[Sample], result: Any) -> Any:
        found = values(result)
        if isinstance(samples, list):
            return found
        if len(found) != 1:
            raise RewardError(f"it was given one completion and returned {len(found)} rewards")
        return found[0]

    async def waiting(samples: Sample | list[Sample]) -> Any:
        return answer(samples, await call(samples))

    return waiting if inspect.iscoroutinefunction(function) else lambda samples: answer(samples, call(samples))


def _trl_arguments(samples: list[Sample]) -> dict[str, Any]:
    names = {name for sample in samples for name in sample.row} - {"prompt", "completion", *NOT_PASSED}
    columns = {name: [sample.row.get(name) for sample in samples] for name in sorted(names)}
    completions = [
        sample.text if isinstance(sample.prompt, str) else [{"role": "assistant", "content": sample.text}]
        for sample in samples
    ]
    return {**columns, "prompts": [sample.prompt for sample in samples], "completions": completions}


def _accepted(parameters: Parameters, arguments: dict[str, Any]) -> dict[str, Any]:
    for name in _needed(parameters):
        if name not in arguments:
            raise RewardError(f"it takes {name}, and the row has no such column{suggestion(name, arguments)}")
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _needed(parameters: Parameters) -> list[str]:
    """Returns the parameters without defaults."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, each in parameters.items() if each.default is each.empty and each.kind not in variadic]


def _verl_arguments(samples: list[Sample]) -> dict[str, Any]:
    (sample,) = samples
    row = sample.row
    if "data_source" not in row or not isinstance(row.get("reward_model"), dict):
        raise RewardError(f"verl's functions need the columns data_source and reward_model; found are {sorted(row)}")
    return {
        "data_source": row["data_source"],
        "solution_str": sample.text,
        "ground_truth": row["reward_model"].get("ground_truth"),
        "extra_info": row.get("extra_info"),
    }
