"""Makes callables from `reward.functions` or `cost.functions` of a config."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.children.code.code_runner import MOST_SECONDS, sandbox_problem
from asyncrl.config.problems import Problem
from asyncrl.config.user_code import (
    LIBRARIES,
    ONE_ARGUMENT,
    is_of_asyncrl,
    library_of,
    missing_import,
    name_of,
    one_argument_mistake,
    resolve,
    source_problem,
    suggestion,
)
from asyncrl.errors import ConfigError
from asyncrl.rewards.sample import CheckRow, Function
from asyncrl.rewards.templates import CODE_TEMPLATES, ENVIRONMENT, JUDGE_TEMPLATE, SANDBOX, TEMPLATES
from asyncrl.rewards.trl_verl_adapters import CALLS, adapted_mistake, column_check, from_trl, from_verl

if TYPE_CHECKING:
    from asyncrl.config.schema import Config, RewardFunction, Scorer  # not at run time: children do without pydantic

SECONDS = "seconds"
"""Name of the option with the seconds that such a template has for an answer, which follows from the deadline."""
JUDGE_SHARE = 0.9
"""Share of the deadline of a call in which a judge tries; then it says why there is no score."""

OVERLAPPING = 64
"""Coroutine calls that run at once: enough for a remote scorer, few enough for its rate limits and our sockets."""

OF_PACKAGES = ("math_verify", "reasoning_gym")
"""Templates whose packages may evaluate an answer, and so read it in a sandbox for programs."""
ADAPTERS: dict[str, Callable[[Callable[..., Any]], Function]] = {"trl": from_trl, "verl": from_verl}


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """One entry of the list `key`, a config key. name: name of its term in metrics and samples. on_error: replaces that
    of the section, unless it is empty."""

    use: str
    name: str
    weight: float = 1.0
    group: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    key: str = "reward.functions"
    on_error: str = ""
    by_token: bool = False

    @property
    def is_users(self) -> bool:
        """Returns whether this is code of the user, or of a package that the user names."""
        return ":" in self.use and not is_of_asyncrl(_split(self.use)[1])


def function_specs(config: "Config", service: "Scorer" = "reward") -> list[FunctionSpec]:
    """Returns the specs of all functions of a section, for rewards with the function of `algorithm.overlong`; where
    episodes are played and rewards have no functions, the environment's rewards. Raises ConfigError if there are
    neither functions nor a model."""
    section = config.scorers[service]
    key = f"{service}.functions"
    if service == "reward" and config.environment.use and not section.functions and not section.model:
        return [FunctionSpec(ENVIRONMENT, ENVIRONMENT, key=key), *overlong_specs(config)]
    if not section.functions and not section.model and not (service == "reward" and config.feedback.asks):
        raise ConfigError(f'{key} is empty; write for example functions = ["exact_match"]')
    specs = [replace(_spec(each, section.deadline, config, key), by_token=each.by_token) for each in section.functions]
    if by_token := [spec.use for spec in specs if spec.by_token and service == "cost"]:
        raise ConfigError(f"{key}: a cost belongs to a whole sample; remove by_token = true from {by_token[0]}")
    return specs + (overlong_specs(config) if service == "reward" else [])


def held_out_specs(config: "Config") -> dict[str, list[FunctionSpec]]:
    """Returns the specs of the held-out sets that have functions of their own, by set."""
    return {
        each.name: [_spec(one, config.reward.deadline, config, f"{each.section}.functions") for one in each.functions]
        for each in config.evaluate.held_out
        if each.functions
    }


def _spec(one: "RewardFunction", deadline: float, config: "Config", key: str) -> FunctionSpec:
    options = _options(one, deadline, config)
    return FunctionSpec(one.use, one.term, one.weight, one.group, options, key)


def _options(function: "RewardFunction", deadline: float, config: "Config") -> dict[str, Any]:
    """Returns the options of a function: a judge has to end its tries before its call is given up, and programs are
    contained as `children.sandbox` says."""
    from asyncrl.config.sections.secret import revealed  # not where children import this: they do without pydantic

    options: dict[str, Any] = revealed(function.options)
    if function.use in (*CODE_TEMPLATES, *OF_PACKAGES):
        if SANDBOX in options:
            raise ConfigError(f"{function.use} has no option {SANDBOX}; write {SANDBOX} in the section [children]")
        options[SANDBOX] = config.children.sandbox
    if function.use in OF_PACKAGES:
        if SECONDS in options:
            raise ConfigError(f"{function.use} has no option {SECONDS}; write deadline in the section of its functions")
        options[SECONDS] = JUDGE_SHARE * deadline
    if function.use == JUDGE_TEMPLATE and options.setdefault("deadline", JUDGE_SHARE * deadline) > deadline:
        raise ConfigError(f"judge has options.deadline = {options['deadline']:g}, over the deadline of {deadline:g} s")
    return options


def overlong_specs(config: "Config") -> list[FunctionSpec]:
    """Returns DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), if `algorithm.overlong` is over 0."""
    share = config.algorithm.overlong
    longest = config.response_tokens
    slack = max(1, round(share * longest))
    options = {"maximum": longest, "slack": slack, "unit": "row_tokens"}
    return [FunctionSpec("length", "overlong", options=options)] if share else []


def function_problems(config: "Config", service: "Scorer" = "reward") -> list[Problem]:
    """Returns problems of a section's functions that are known before any of the user's code runs."""
    try:
        specs = function_specs(config, service)
        if service == "reward":
            specs += [spec for own in held_out_specs(config).values() for spec in own]
    except ConfigError as error:
        return [Problem.of_error(error, f"{service}.functions")]
    is_here = service not in config.fleet.joined
    found = [problem for spec in specs if (problem := _problem(spec, is_here)) is not None]
    return found or list(_code_problems(specs, config.scorers[service].deadline, is_here))


def row_checks(config: "Config", held_out: str | None = None) -> list[tuple[str, CheckRow]]:
    """Returns what the templates of ours ask of a row, by their names. held_out: a set with functions of its own. None
    are returned where a function cannot be loaded, which `function_problems` says."""
    try:
        specs = [spec for service in config.scorers for spec in function_specs(config, service)]
        specs = specs if held_out is None else held_out_specs(config)[held_out]
        loaded = [(spec.use, load(spec)) for spec in specs if ":" not in spec.use]
    except ConfigError:
        return []
    of_others = [(spec.use, column_check(*_split(spec.use), spec.options)) for spec in specs if _split(spec.use)[0]]
    return [(use, function.check_row) for use, function in loaded if hasattr(function, "check_row")] + of_others


def _code_problems(specs: Sequence[FunctionSpec], deadline: float, is_here: bool) -> Iterator[Problem]:
    """Yields why rewards for programs cannot work: no sandbox starts here, or a call ends before its tests do. is_here:
    whether they run on this host."""
    of_code = [spec for spec in specs if spec.use in CODE_TEMPLATES]
    inside = [*of_code, *(spec for spec in specs if spec.use in OF_PACKAGES)]
    if inside and is_here:
        first = inside[0]
        does = "runs programs" if of_code else "reads answers, which its package may evaluate,"
        if problem := sandbox_problem(first.key, first.use, first.options[SANDBOX], does):
            yield problem
    for spec in of_code:
        parameter = inspect.signature(CODE_TEMPLATES[spec.use]).parameters.get("seconds")
        seconds = spec.options.get("seconds", parameter.default) if parameter is not None else 0.0
        if (most := MOST_SECONDS * seconds) >= deadline:
            key = f"{spec.key.partition('.')[0]}.deadline"
            text = f"the tests of a program may take {MOST_SECONDS} times the {seconds:g} seconds of {spec.use}"
            yield Problem(key, "", f"{text}: write more than {most:g}, not {deadline:g}", (spec.key,))


def _problem(spec: FunctionSpec, is_here: bool) -> Problem | None:
    if ":" in spec.use:
        adapter, name = _split(spec.use)
        wrong = partial(adapted_mistake, adapter) if adapter else one_argument_mistake
        problem = source_problem(name, spec.key, partial(wrong, spec.options), CALLS.get(adapter, ONE_ARGUMENT))
        return missing_import(name, spec.key) if problem is None and is_here else problem
    try:
        _from_template(spec)
    except ConfigError as error:
        return Problem.of_error(error, spec.key)
    return None


def load(spec: FunctionSpec) -> Function:
    """Loads a function and binds its options; raises ConfigError if there is none, or it does not take them."""
    if ":" not in spec.use:
        return _from_template(spec)
    adapter, name = _split(spec.use)
    function = resolve(name, spec.key)
    if not callable(function):
        raise ConfigError(f"{spec.key}: {name} is not a function")
    if spec.options:
        _check_options(function, spec, given=1)
        function = partial(function, **spec.options)
    try:
        return ADAPTERS[adapter](function) if adapter else taking_one(function)
    except ConfigError as error:
        raise ConfigError(f"{spec.key}: {spec.use}: {error}") from None


def taking_one(function: Function) -> Function:
    """Returns `function`; raises ConfigError when it cannot be called with one argument, a Sample or a list of them."""
    if inspect.isclass(function):
        raise ConfigError(
            f"{function.__name__} is a class, and no function: give an object of it, {function.__name__}()"
        )
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # written in C: it may take anything
        return function
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    if library := library_of(list(signature.parameters), takes_any=takes_any):
        name = name_of(function)
        raise ConfigError(
            f"{name}{signature} is one of {LIBRARIES[library]}: write from_{library}({name}), with "
            f"`from asyncrl.rewards import from_{library}`, or {library}:FILE.py:{name} in a config"
        )
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(f"{ONE_ARGUMENT}, not as {name_of(function)}{signature}: {error}") from None
    return function


def overlapping(function: Function) -> int:
    """Returns how many calls may run at one time: none beside another for plain functions, which compute; OVERLAPPING
    for coroutine functions, which wait, or what their attribute `overlapping` says."""
    target = function.func if isinstance(function, partial) else function
    waits = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004
    return getattr(target, "overlapping", OVERLAPPING) if waits else 0


def _split(use: str) -> tuple[str, str]:
    """Splits `use` into an adapter ("" for none) and the name of a function."""
    adapter, _, rest = use.partition(":")
    return (adapter, rest) if adapter in ADAPTERS and ":" in rest else ("", use)


def _from_template(spec: FunctionSpec) -> Function:
    if spec.use not in TEMPLATES:
        raise ConfigError(
            f"{spec.key}: there is no template {spec.use}{suggestion(spec.use, TEMPLATES)} {_own_function(spec.use)}"
        )
    if spec.group:
        raise ConfigError(f"{spec.key}: {spec.use} scores samples one by one; remove group = true")
    if spec.by_token:
        raise ConfigError(f"{spec.key}: {spec.use} gives one reward to a sample; remove by_token = true")
    template = TEMPLATES[spec.use]
    _check_options(template, spec, given=0)
    try:
        return template(**spec.options)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{spec.key}: {spec.use}: {error}") from None


def _own_function(use: str) -> str:
    """Returns how a function of one's own is written, where `use` may name its file or module only."""
    module, _, name = use.rpartition(".")
    if name == "py":
        return f"A function of that file is written {use}:NAME."
    if module and Path(f"{module}.py").is_file():
        return f"A function of {module}.py is written {module}.py:{name}."
    return "A function of your own is written FILE.py:NAME."


def _check_options(function: Callable[..., Any], spec: FunctionSpec, given: int) -> None:
    """Checks options against the signature. given: number of leading parameters that are not options."""
    parameters = list(inspect.signature(function).parameters.values())[given:]
    names = [parameter.name for parameter in parameters]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for name in spec.options:
        if name not in names and not takes_any:
            raise ConfigError(f"{spec.key}: {spec.use} has no option {name}{suggestion(name, names)}")
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if needed and given == 0 and parameter.name not in spec.options:
            text = f'{spec.use} needs the option {parameter.name}: {{ use = "{spec.use}", options = '
            raise ConfigError(f"{spec.key}: {text}{{ {parameter.name} = ... }} }}")
