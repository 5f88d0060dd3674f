"""Adapts reward functions that were written for other libraries."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any

from asyncrl.config.user_code import Parameters as UserParameters
from asyncrl.config.user_code import name_of, parameters_in, suggestion
from asyncrl.config.written_values import written_or
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.sample import CheckRow, Function, Logged, RowError, Sample

Parameters = Mapping[str, inspect.Parameter]

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments that a function of TRL gets besides columns."""
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Arguments that a function of verl is called with, by name."""
VERL_COLUMNS = ("data_source", "reward_model")
"""Columns of rows that these arguments are from."""
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
        raise ConfigError(f"{name_of(function)}: {missing}")
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
    if found.by_place:
        return _by_place_only(found.by_place)
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
    told = f"it takes {' and '.join(missing)}, which TRL passes and asyncrl does not; give it a default: "
    if single := next((name for name in needed if f"{name}s" in GIVEN), ""):
        return f"it takes {single}, and TRL passes {single}s, a list"
    return f"{told}{missing[0]}=None" if missing else ""


def _by_place_only(names: Sequence[str]) -> str:
    """Returns why a function cannot be called that has these parameters before a slash."""
    return f"it takes {', '.join(names)} by place only: take the / out of its parameters"


def column_check(library: str, function: str, options: Collection[str]) -> CheckRow:
    """Returns what raises RowError for a row without a column that a function of TRL or verl, `FILE.py:NAME`, needs, as
    far as its source shows that. options: arguments that a config gives it."""
    found = parameters_in(function)
    shown = found.needed if library == "trl" and found is not None else ()
    needed: Sequence[str] = (
        VERL_COLUMNS if library == "verl" else [each for each in shown if each not in {*options, *GIVEN}]
    )
    if found is not None and adapted_mistake(library, options, found):
        needed = ()  # That is another problem.

    def check(row: Mapping[str, Any]) -> None:
        for column in needed:
            if column not in row:
                raise RowError.missing(column, row)

    return check


@dataclass(frozen=True, slots=True)
class TrainerState:
    """State of training for a function of TRL, with names of TRL. global_step: training steps behind the weights that
    sampled the completions. max_steps: steps of the run."""

    global_step: int
    max_steps: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"asyncrl's trainer_state has global_step and max_steps, and no {name}")


def _serving_both(function: Callable[..., Any], calls: "Callable[[list[Sample]], _TrlCall | _VerlCall]") -> Function:
    """Makes a function of one sample or a group, named like `function`; it is a coroutine function exactly if
    `function` is one."""
    name = name_of(function)
    parameters = inspect.signature(function).parameters
    by_place = [each for each in _needed(parameters) if parameters[each].kind is inspect.Parameter.POSITIONAL_ONLY]
    if by_place:
        raise ConfigError(f"{name}: {_by_place_only(by_place)}")

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
        return answer(samples, call.values(await function(**call.arguments()), name))

    def computing(samples: Sample | list[Sample]) -> Any:
        call = begun(samples)
        return answer(samples, call.values(function(**call.arguments()), name))

    waits = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    adapted = update_wrapper(waiting if waits else computing, function, updated=())
    del adapted.__wrapped__  # Whoever asks for its parameters shall find one, the sample.
    adapted.__name__ = name
    return adapted


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

    def values(self, result: Any, function: str) -> list[Any]:
        for name, logged in self._metrics.items():
            for terms in self.terms:
                terms[name] = sum(logged) / len(logged)
        found = _listed(result, function)
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


def _listed(result: Any, function: str) -> list[Any]:
    """Returns the rewards that a function of TRL returned; raises RewardError for anything but a list of them."""
    try:
        if not isinstance(result, str | bytes | Mapping):
            return list(result)
    except TypeError:
        pass
    raise RewardError(
        f"{function} returned {result!r:.80}, and a function of TRL returns a list: one number or None a completion"
    )


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
        if any(name not in row for name in VERL_COLUMNS):
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

    def values(self, result: Any, function: str) -> list[Any]:
        if isinstance(result, dict) and "score" not in result:
            raise RewardError(f'{function} returned {result!r:.80}, and of a dict the reward is "score": there is none')
        return [result["score"] if isinstance(result, dict) else result]


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)
