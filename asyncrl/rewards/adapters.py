"""Reward functions written for other libraries, used as they are."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.sample import Function, Sample


def from_trl(function: Callable[..., Any]) -> Function:
    """A reward function of TRL's GRPOTrainer: `f(prompts, completions, **columns) -> list of float or None`.

    Completions are text, or one assistant message each where prompts are messages, as TRL passes them. Columns are
    lists with a value for each sample. There are no `completion_ids` and no `trainer_state`. Serves single samples
    and, with `group = true`, whole groups.
    """
    return _serving_both(function, lambda samples: function(**_accepted(function, _trl_arguments(samples))), list)


def from_verl(function: Callable[..., Any]) -> Function:
    """A reward function of verl: `compute_score(data_source, solution_str, ground_truth, extra_info=None)`.

    Rows have verl's columns. Of a dict only `score` counts, as in verl. Serves single samples.
    """
    return _serving_both(function, lambda samples: function(**_verl_arguments(samples)), _verl_values)


def _serving_both(
    function: Callable[..., Any], call: Callable[[list[Sample]], Any], values: Callable[[Any], list[Any]]
) -> Function:
    """A function of one sample or a group; a coroutine function exactly if `function` is one."""

    def answer(samples: Sample | list[Sample], result: Any) -> Any:
        found = values(result)
        return found if isinstance(samples, list) else _only(found)

    if inspect.iscoroutinefunction(function):

        async def waiting(samples: Sample | list[Sample]) -> Any:
            return answer(samples, await call(samples if isinstance(samples, list) else [samples]))

        return waiting

    def plain(samples: Sample | list[Sample]) -> Any:
        return answer(samples, call(samples if isinstance(samples, list) else [samples]))

    return plain


def _only(values: Sequence[Any]) -> Any:
    if len(values) != 1:
        raise RewardError(f"it was given one completion and returned {len(values)} rewards")
    return values[0]


def _trl_arguments(samples: list[Sample]) -> dict[str, Any]:
    names = {name for sample in samples for name in sample.row if name != "prompt"}
    columns = {name: [sample.row.get(name) for sample in samples] for name in sorted(names)}
    return {
        **columns,
        "prompts": [sample.prompt for sample in samples],
        "completions": [_trl_completion(sample) for sample in samples],
    }


def _trl_completion(sample: Sample) -> str | list[dict[str, str]]:
    return sample.text if isinstance(sample.prompt, str) else [{"role": "assistant", "content": sample.text}]


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


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


def _verl_values(result: Any) -> list[Any]:
    return [result["score"] if isinstance(result, dict) else result]
