"""Adapts reward functions that were written for other libraries."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from asyncrl.config.user_code import Parameters as UserParameters
from asyncrl.config.user_code import name_of, suggestion
from asyncrl.config.written_values import written_or
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.sample import Function, Logged, Sample

Parameters = Mapping[str, inspect.Parameter]

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments that a function of TRL gets besides columns."""
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Arguments that a function of verl is called with, by name."""
CALLS = {
    "trl": "a function of TRL is called with prompts, completions and columns",
    "verl": f"a function of verl is called with {', '.join(VERL_ARGUMENTS)}",
}
"""Calls of functions of other libraries, for errors."""
NOT_PASSED = ("environments",)
"""Arguments that TRL passes too, and that only its own trainer has."""


def from_trl(function: Callable[..., Any]) -> Function:
    """Adapts a reward function of TRL's GRPOTrainer, `f(prompts, completions, **columns) -> list of float or None`, to
    single samples and, with `group = true`, whole groups; raises ConfigError if it needs an argument of NOT_PASSED.
    Completions are text, or one assistant message each where prompts are messages. Columns have a value a sample.

    It may take completion_ids, the lists of sampled tokens; trainer_state, a `TrainerState`; log_metric(name, number)
    and log_extra(column, a value for each completion), whose numbers become terms of the samples besides the reward."""
    parameters = inspect.signature(function).parameters
    if missing := needed_in_vain(_needed(parameters)):
        raise ConfigError(f"{name_of(function)} {missing}")
    adapted = _serving_both(function, partial(_TrlCall, parameters))
    setattr(adapted, _TAKES_IDS, True)
    return adapted


def from_verl(function: Callable[..., Any]) -> Function:
    """Adapts a reward function of verl, `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, to
    single samples. Rows have verl's columns. Of a dict only `score` counts, as in verl."""
    return _serving_both(function, _VerlCall)


def adapted_mistake(library: str, options: Collection[str], found: UserParameters) -> str:
    """Returns what is wrong about the parameters of a function of TRL or verl; "" if it can be called. Of TRL only rows
    tell whether they have a column for each. options: arguments that a config gives it."""
    needed = [name for name in found.needed if name not in options]
    if library == "trl":
        return needed_in_vain(needed)
    unknown = [name for name in VERL_ARGUMENTS if name not in found.named and not found.takes_any]
    if unknown:
        return f"it does not take {' and '.join(unknown)}"
    missing = [name for name in needed if name not in VERL_ARGUMENTS]
    return f"nothing is given for {', '.join(missing)}" if missing else ""


_TAKES_IDS = "takes_token_ids"


def takes_token_ids(function: Callable[..., Any] | str) -> bool:
    """Returns whether a function, or what a config names by `use`, is one of TRL, which is given token ids."""
    return function.startswith("trl:") if isinstance(function, str) else getattr(function, _TAKES_IDS, False)


def needed_in_vain(needed: Sequence[str]) -> str:
    """Returns why a function of TRL cannot be called that has these parameters without defaults; "" if it can."""
    missing = [name for name in needed if name in NOT_PASSED]
    told = f"takes {' and '.join(missing)}, which TRL passes and asyncrl does not; give it a default: "
    return f"{told}{missing[0]}=None" if missing else ""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """State of training for a function of TRL, with names of TRL. global_step: training steps behind the weights that
    sampled the completions. max_steps: steps of the run."""

    global_step: int
    max_steps: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"asyncrl's trainer_state has global_step and max_steps, and no {name}")


def _serving_both(function: Callable[..., Any], calls: "Callable[[list[Sample]], _TrlCall | _VerlCall]") -> Function:
    """Makes a function of one sample or a group; it is a coroutine function exactly if `function` is one."""

    def begun(samples: Sample | list[Sample]) -> "_TrlCall | _VerlCall":
        return calls(samples if isinstance(samples, list) else [samples])

    def answer(samples: Sample | list[Sample], found: list[Any]) -> Any:
        if isinstance(samples, list):
            return found
        if len(found) != 1:
            raise RewardError(f"it was given one completion and returned {len(found)} rewards")
        return found[0]

    async def waiting(samples: Sample | list[Sample]) -> Any:
        call = begun(samples)
        return answer(samples, call.values(await function(**call.arguments())))

    def computing(samples: Sample | list[Sample]) -> Any:
        call = begun(samples)
        return answer(samples, call.values(function(**call.arguments())))

    return waiting if inspect.iscoroutinefunction(function) else computing


@dataclass(slots=True)
class _TrlCall:
    """One call of a function of TRL, and what it logs. terms: of each sample, the numbers by name."""

    parameters: Parameters
    samples: list[Sample]
    terms: list[dict[str, float]] = field(init=False)
    _metrics: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.terms = [{} for _ in self.samples]

    def arguments(self) -> dict[str, Any]:
        samples = self.samples
        names = {name for sample in samples for name in sample.row} - {"prompt", "completion", *GIVEN, *NOT_PASSED}
        columns = {name: [sample.row.get(name) for sample in samples] for name in sorted(names)}
        completions = [
            sample.text if isinstance(sample.prompt, str) else [{"role": "assistant", "content": sample.text}]
            for sample in samples
        ]
        given = {
            "prompts": [sample.prompt for sample in samples],
            "completions": completions,
            "completion_ids": [list(sample.token_ids) for sample in samples],
            "trainer_state": TrainerState(max(each.version for each in samples), max(each.steps for each in samples)),
            "log_extra": self._log_extra,
            "log_metric": self._log_metric,
        }
        return _accepted(self.parameters, {**columns, **given})

    def values(self, result: Any) -> list[Any]:
        for name, logged in self._metrics.items():
            for terms in self.terms:
                terms[name] = sum(logged) / len(logged)
        found = list(result)
        if len(found) != len(self.samples):
            return found  # Whoever called says that these are too many or too few.
        return [Logged(value, terms) if terms else value for value, terms in zip(found, self.terms, strict=True)]

    def _log_metric(self, name: str, value: Any) -> None:
        """Adds a number of the whole call; the term of each sample is the mean of those of one name."""
        self._metrics.setdefault(str(name), []).append(_number(value, f"log_metric({name!r}, ...)"))

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Adds a value of each completion: a number as its term, anything else to what the function prints."""
        found = list(values)
        if len(found) != len(self.samples):
            count = f"{len(found)} values for {len(self.samples)} completions"
            raise RewardError(f"it called log_extra({column!r}, ...) with {count}: give one for each")
        for terms, value in zip(self.terms, found, strict=True):
            if hasattr(value, "__float__"):
                terms[str(column)] = _number(value, f"log_extra({column!r}, ...)")
        if any(value is not None and not hasattr(value, "__float__") for value in found):
            print(f"{column}: {found!r}")  # noqa: T201 - into the file of what the functions print


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RewardError(f"it called {what} with {value!r:.80}, which is no number") from None


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


@dataclass(frozen=True, slots=True)
class _VerlCall:
    """One call of a function of verl, which scores one sample."""

    samples: list[Sample]

    def arguments(self) -> dict[str, Any]:
        (sample,) = self.samples
        row = sample.row
        if "data_source" not in row or "reward_model" not in row:
            found = sorted(row)
            raise RewardError(f"verl's functions need the columns data_source and reward_model; found are {found}")
        # Files without tables hold them as text.
        model, extra = (written_or(row.get(name), _is_table) for name in ("reward_model", "extra_info"))
        if not _is_table(model):
            raise RewardError(
                f"the row's reward_model is no table with ground_truth, nor the text of one: {model!r:.80}"
            )
        return {
            "data_source": row["data_source"],
            "solution_str": sample.text,
            "ground_truth": model.get("ground_truth"),
            "extra_info": extra,
        }

    def values(self, result: Any) -> list[Any]:
        return [result["score"] if isinstance(result, dict) else result]


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)
