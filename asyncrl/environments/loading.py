"""Makes environments from the section `[environment]` of a config."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from asyncrl.children.code.code_runner import sandbox_problem
from asyncrl.children.containment import Containment, Surroundings, WithoutNetwork
from asyncrl.config.problems import Problem
from asyncrl.config.user_code import is_of_asyncrl, outline_of, resolve, source_problem, suggestion
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.schema import Config  # not at run time: children do without pydantic
    from asyncrl.config.sections.task_config import EnvironmentConfig

KEY = "environment.use"
TOOLS = "tools"
MCP = "mcp"
BUILTIN = {
    "calculator": "asyncrl.environments.games:Calculator",
    "dialogue": "asyncrl.environments.games:Dialogue",
    "guess": "asyncrl.environments.games:Guess",
    "repair": "asyncrl.environments.program_repair:ProgramRepair",
    TOOLS: "asyncrl.environments.tools.tool_environment:ToolEnvironment",
}
OF_PROGRAMS = ("repair",)
"""Environments that run programs of the policy, in sandboxes."""
OF_AGENTS = ("agent", "verifiers")
"""Environments that start a program of the user for each episode, and run no other code of the user's."""
SANDBOX = "sandbox"
CONTAINMENT = "containment"
"""Names of their arguments that are no options of users."""
ADAPTERS = {
    "agent": "asyncrl.environments.agents.agent:Agent",
    "gymnasium": "asyncrl.environments.adapters.gymnasium_text:GymnasiumText",
    MCP: "asyncrl.environments.adapters.mcp_tools:McpTools",
    "openenv": "asyncrl.environments.adapters.openenv_client:OpenEnvClient",
    "textarena": "asyncrl.environments.adapters.textarena_game:TextArenaGame",
    "verifiers": "asyncrl.environments.agents.agent:VerifiersTaskset",
}
"""Environments of other packages, written `gymnasium:ID`: the class that plays them takes the ID first."""

FIRST = {"agent": "command", "mcp": "command", "openenv": "url"}
"""Names the argument that takes the ID, where it is not `id`."""

CALLS = {"reset": ("row", "seed"), "step": ("message",)}
"""Methods of an environment, and the arguments that each is called with."""
CLOSE = "close"
"""The method that an environment may have, for what it holds: called without arguments when its episode has ended."""
WAITS = "waits_for"
"""The attribute that an environment may have: what it waits for, for the error about a call that hangs."""
SAMPLED = "sampled"
OPENED = "opened"
"""Further arguments that `step` may take: a SampledAnswer, and whether the prompt had opened thoughts in which the
message begins."""

MakeEnvironment: TypeAlias = Callable[[], Any]
"""Makes the environment of one episode."""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Names what to load: one of BUILTIN, `FILE.py:Class` or `module:Class`, and keyword arguments of the class.
    max_bytes: of an observation."""

    use: str
    options: Mapping[str, Any] = field(default_factory=dict)
    max_bytes: int = 16384

    @classmethod
    def of(cls, config: "Config") -> "EnvironmentSpec":
        """Returns the spec of the section; programs are contained as `children.sandbox` says. Raises ConfigError where
        the options say something else."""
        from asyncrl.config.sections.secret import revealed  # not where children import this: they do without pydantic

        section = config.environment
        options = revealed(config.environment.options)
        spec = cls(section.use, options, section.max_bytes)
        own = SANDBOX if section.use in OF_PROGRAMS else CONTAINMENT if spec.is_of_agents else None
        if own in options:
            raise ConfigError(f"environment.options: {section.use} has no option {own}; write it in [children]")
        if own == SANDBOX:
            options[SANDBOX] = config.children.sandbox
        return spec

    @property
    def named(self) -> list[str]:
        """Returns the texts that may name files of the environment."""
        return [self.use, *_texts(self.options)]

    @property
    def is_of_agents(self) -> bool:
        """Returns whether each episode is a program of its own."""
        return self.use.partition(":")[0] in OF_AGENTS

    @property
    def is_users(self) -> bool:
        """Returns whether this is code of the user, or runs code that the user names: tools, a package, a command."""
        if self.use not in BUILTIN:
            return not is_of_asyncrl(self.use)
        return not all(map(is_of_asyncrl, _texts(self.options.get("functions", ()))))


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in options."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for each in value.values() for text in _texts(each))
    elif isinstance(value, Sequence):
        yield from (text for each in value for text in _texts(each))


def contained(spec: EnvironmentSpec, containment: Containment | None) -> tuple[EnvironmentSpec, Surroundings | None]:
    """Returns the spec to load, and what contains the child that loads it. containment: of the user's code; None:
    nothing contains it. Each agent is contained alone, so that it reaches no other one; their child runs code of
    asyncrl only, and shares with them the network, in which it listens."""
    if containment is None or not spec.is_of_agents:
        return spec, containment
    own = asdict(replace(containment, network=True))
    return replace(spec, options={**spec.options, CONTAINMENT: own}), None if containment.network else WithoutNetwork()


def load(spec: EnvironmentSpec) -> MakeEnvironment:
    """Returns what makes environments; raises ConfigError if there is no such class, it lacks a method, or it does not
    take the options. Making one runs the user's code, which belongs into a child, and raises the error of a class that
    refuses the values of its options."""
    spec = _adapted(spec)
    environment = _class_of(spec)
    _refuse_other_class(environment, spec)
    return partial(environment, **spec.options)


def _refuse_other_class(environment: Any, spec: EnvironmentSpec) -> None:
    """Raises ConfigError for what is no class, lacks a method, or does not take the options."""
    if not inspect.isclass(environment):
        kind = "a function" if inspect.isroutine(environment) else f"a {type(environment).__name__}"
        raise ConfigError(f"{KEY}: {spec.use} is {kind}; write a class with the methods `reset` and `step`")
    for method, arguments in CALLS.items():
        write = f"write `async def {method}(self, {', '.join(arguments)}) -> Observation`"
        _check_method(environment, method, arguments, spec.use, write)
    if getattr(environment, CLOSE, None) is not None:
        _check_method(environment, CLOSE, (), spec.use, f"write `async def {CLOSE}(self) -> None`")
    try:
        inspect.signature(environment).bind(**spec.options)
    except TypeError as error:
        names = [name for name in inspect.signature(environment).parameters if name not in spec.options]
        raise ConfigError(
            f"environment.options: {spec.use} is made with {_call('', spec.options)}: {error}"
            f"{suggestion(next(iter(spec.options), ''), names)}"
        ) from None


def takes(environment: Any, argument: str) -> bool:
    """Returns whether `step` of an environment takes a further argument: SAMPLED or OPENED."""
    return argument in inspect.signature(environment.step).parameters


def _adapted(spec: EnvironmentSpec) -> EnvironmentSpec:
    """Returns the spec of the class that plays an environment of another package; other specs as they are."""
    kind, _, name = spec.use.partition(":")
    if kind not in ADAPTERS:
        return spec
    return replace(spec, use=ADAPTERS[kind], options={FIRST.get(kind, "id"): name, **spec.options})


def _class_of(spec: EnvironmentSpec) -> Any:
    if ":" not in spec.use and spec.use not in BUILTIN:
        raise ConfigError(
            f"{KEY}: there is no environment {spec.use}{suggestion(spec.use, BUILTIN)} "
            "A class of your own is written FILE.py:Class."
        )
    return resolve(BUILTIN.get(spec.use, spec.use), KEY)


def _check_method(environment: Any, name: str, arguments: tuple[str, ...], use: str, write: str) -> None:
    method = getattr(environment, name, None)
    if not callable(method):
        raise ConfigError(f"{KEY}: {use} has no method `{name}`; {write}")
    if inspect.isasyncgenfunction(method) or inspect.isgeneratorfunction(method):
        raise ConfigError(f"{KEY}: `{name}` of {use} yields, and has to return; {write}")
    try:
        signature = inspect.signature(method)
        further = (SAMPLED, OPENED) if name == "step" else ()
        signature.bind(None, *arguments, **{each: None for each in further if each in signature.parameters})
    except TypeError as error:
        raise ConfigError(f"{KEY}: `{name}` of {use} is called as {_call(name, arguments)}: {error}; {write}") from None


def _call(name: str, arguments: Any) -> str:
    return f"{name}({', '.join(arguments)})"


def answer_role(section: "EnvironmentConfig") -> str:
    """Returns the role in which an environment answers, where its name says it; "" where only its messages will."""
    of_tools = section.use == TOOLS or section.use.startswith(f"{MCP}:")
    return str(section.options.get("role", "tool")) if of_tools else ""


def environment_problems(config: "Config") -> list[Problem]:
    """Returns problems of the environment that are known before any of the user's code runs."""
    try:
        spec = EnvironmentSpec.of(config)
    except ConfigError as error:
        return [Problem.of_error(error, KEY)]
    if not spec.use:
        return []
    runs_programs_here = spec.use in OF_PROGRAMS and "environment" not in config.fleet.joined
    if runs_programs_here and (problem := sandbox_problem(KEY, spec.use, config.children.sandbox)) is not None:
        return [problem]
    if ":" in spec.use and _adapted(spec) is spec:
        problem = source_problem(spec.use, KEY)
        outline = outline_of(spec.use) if problem is None else None
        if outline is None:
            return [] if problem is None else [problem]
    else:
        outline = None
    try:
        load(spec) if outline is None else _refuse_other_class(outline, spec)
    except ConfigError as error:
        return [Problem.of_error(error, KEY)]
    return []
