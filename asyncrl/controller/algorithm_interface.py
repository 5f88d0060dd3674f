"""An algorithm as the controller runs it: its two functions, checks of what it hands in, and where its errors lie."""

import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Container, Sequence, Sized
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.concurrency import root_cause
from asyncrl.config.user_code import name_of
from asyncrl.controller.rollouts import Attempt
from asyncrl.errors import AlgorithmError, AsyncrlError, ConfigError
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef, RowRef, SampleName
from asyncrl.protocols.messages import Score

if TYPE_CHECKING:
    from asyncrl.controller.controller import Controller


COLUMNS = {
    "reference": ("reference_logprobs", "samples = control.holds(await fleet.reference.logprobs(samples))"),
    "critic": ("values", "samples = control.holds(samples.also_at(await fleet.critic.values(samples)))"),
    "cost_critic": ("cost_values", "samples = control.holds(samples.also_at(await fleet.cost_critic.values(samples)))"),
}
"""The column that the trainer reads of each sample where a service is part of the fleet, and the call that makes it."""


EPISODE_COLUMN = "turn_rewards"
"""A column that only an environment makes."""

ARGUMENTS = {"roll_out": ("fleet", "control", "group"), "train": ("fleet", "control")}
"""Arguments that each function of an algorithm is called with."""


@dataclass(frozen=True, slots=True, repr=False)
class Algorithm:
    """An algorithm: two plain async functions.

    roll_out(fleet, control, group) returns when every sample of the group was handed to `control.ready`; it may be
    cancelled and called again. train(fleet, control) returns when `control.iterations()` ends. name: of a user's
    algorithm; empty for the algorithms of asyncrl.
    """

    roll_out: Callable[[Fleet, "Controller", Attempt], Awaitable[None]]
    train: Callable[[Fleet, "Controller"], Awaitable[None]]
    name: str = ""

    def __repr__(self) -> str:
        """Returns the names of its functions, for errors."""
        return f"Algorithm({name_of(self.roll_out)}, {name_of(self.train)})"


@dataclass(frozen=True, slots=True)
class AttributedTo:
    """Turns an error raised inside the scope into an AlgorithmError that names the user's function and the line.

    Errors of asyncrl itself and timeouts pass unchanged: a lost worker is no fault of the algorithm.
    """

    algorithm: Algorithm
    function: Literal["roll_out", "train"]

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or not self.algorithm.name:
            return
        cause = root_cause(error)
        what = f"{self.function} of {self.algorithm.name}"
        if isinstance(cause, AlgorithmError):
            raise AlgorithmError(f"{what}: {cause}{self._line(cause)}") from cause
        if isinstance(cause, Exception) and not isinstance(cause, AsyncrlError | TimeoutError):
            raise AlgorithmError(f"{what} raised {type(cause).__name__}: {cause}{self._line(cause)}") from cause

    def _line(self, cause: Exception) -> str:
        code = getattr(inspect.unwrap(getattr(self.algorithm, self.function)), "__code__", None)
        frames = traceback.extract_tb(cause.__traceback__)
        own = [frame for frame in frames if code is not None and frame.filename == code.co_filename] or frames[-1:]
        return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


class AlgorithmChecks:
    """Checks the calls of an algorithm, and remembers which samples it dropped of groups that still roll out. by_token:
    whether the trainer reads the rewards of single tokens."""

    def __init__(self, fleet: Fleet, by_token: bool = False) -> None:
        self._by_token = by_token
        self._needed = [service for service in COLUMNS if getattr(fleet, service) is not None]
        self._with_costs = fleet.cost is not None
        self._with_episodes = fleet.environment is not None
        self._dropped: dict[int, set[SampleName]] = {}

    def check_generated(self, samples: BatchRef) -> None:
        """Raises AlgorithmError for a sample that no environment answered to its end, in a run with one."""
        if not self._with_episodes:
            return
        for row in samples:
            if not row.finish or not any(EPISODE_COLUMN in place.columns for place in row.places):
                raise AlgorithmError(
                    f"control.generated got sample {row.key}, whose episode was not played to its end, and "
                    "environment.use names an environment: write `await play(fleet, control, group, score)`, from "
                    "asyncrl.algorithms.play_episode, in place of `fleet.generation.generate`, or leave "
                    "environment.use out"
                )

    def check_ready(self, samples: BatchRef, scores: Sequence[Score], costs: Sequence[Score] | None) -> None:
        """Raises AlgorithmError for a missing score or cost, a sample dropped before, or a sample without a column."""
        self.check_scores("ready", samples, scores)
        if costs is not None:
            self.check_scores("ready", samples, costs, "cost")
        elif self._with_costs:
            raise AlgorithmError(
                "control.ready got no costs, which this algorithm holds under a limit: write "
                "`control.ready(samples, scores, await fleet.cost.score(samples, group.row))`"
            )
        for row, score in zip(samples, scores, strict=True):
            if row.name in self._dropped.get(row.group, ()):
                raise AlgorithmError(
                    f"control.ready got sample {row.key}, which was handed to `control.drop`: call one of them"
                )
            if score.reward is not None:
                self._check_columns(row)
                if self._by_token and score.place is None:
                    raise AlgorithmError(
                        f"control.ready got for sample {row.key} a score without the rewards of its tokens, which a "
                        "reward function gives: change a score of `fleet.reward.score` with dataclasses.replace"
                    )

    def check_scores(self, function: str, samples: BatchRef, scores: Sequence[Score], service: str = "reward") -> None:
        """Raises AlgorithmError unless there is one finite score, or a score without a reward, for each sample."""
        each = scores if isinstance(scores, Sized) else [scores]
        plural = "costs" if service == "cost" else "scores"
        if wrong := next((type(score).__name__ for score in each if not isinstance(score, Score)), ""):
            raise AlgorithmError(
                f"control.{function}: {plural} are what `await fleet.{service}.score(samples, group.row)` answered, "
                f"not {wrong}s"
            )
        if len(samples) != len(each):
            raise AlgorithmError(f"control.{function} got {len(samples)} samples and {len(each)} {plural}")
        for row, score in zip(samples, each, strict=True):
            if score.reward is not None and not math.isfinite(score.reward):
                raise AlgorithmError(
                    f"control.{function} got the {service} {score.reward} for sample {row.key}: write None for a "
                    f"sample without a {service}"
                )

    def remember_drop(self, row: RowRef, running: Container[int]) -> None:
        """Remembers a sample that the algorithm dropped. running: groups that still roll out; others are forgotten."""
        if row.group not in self._dropped:
            self._dropped = {group: names for group, names in self._dropped.items() if group in running}
        self._dropped.setdefault(row.group, set()).add(row.name)

    def _check_columns(self, row: RowRef) -> None:
        for service in self._needed:
            column, write = COLUMNS[service]
            if not any(column in place.columns for place in row.places):
                raise AlgorithmError(
                    f"control.ready got sample {row.key} without what the {service} service says of it ({column}), "
                    f"which this algorithm trains with: write `{write}` before"
                )


def algorithm_from(given: Any, where: str) -> Algorithm:
    """Returns an `Algorithm` as it is, or makes one of a module or object with the two functions.

    Raises ConfigError, whose text begins with `where`, when a function is missing, not async or takes other arguments.
    """
    if mistakes := [mistake for name in ARGUMENTS if (mistake := _mistake(given, name))]:
        raise ConfigError(f"{where} is no algorithm: {_instead(given) or '; '.join(mistakes)}")
    return given if isinstance(given, Algorithm) else Algorithm(given.roll_out, given.train)


def _instead(given: object) -> str:
    """Says what to write for an object of the wrong kind; empty: its kind is right."""
    if inspect.isroutine(given):
        return "it is one function, and an algorithm has two, write `asyncrl.Algorithm(roll_out, train)`"
    if inspect.isclass(given) and all(callable(getattr(given, name, None)) for name in ARGUMENTS):
        return f"it is a class, give an instance, write `{given.__name__}(...)`"
    return ""


def _mistake(given: object, name: str) -> str:
    """Says what is wrong with one function of an algorithm; empty: nothing."""
    function = getattr(given, name, None)
    arguments = ", ".join(ARGUMENTS[name])
    write = f"write `async def {name}({arguments})`"
    if not callable(function):
        return f"it has no function {name}, {write}"
    calls = (function, getattr(function, "__call__", None))  # noqa: B004
    if not any(inspect.iscoroutinefunction(each) for each in calls):
        kind = "yields" if inspect.isasyncgenfunction(function) else "is not async"
        return f"its {name} {kind}, {write}"
    signature = inspect.signature(function)
    try:
        signature.bind(*ARGUMENTS[name])
    except TypeError:
        return f"its {name} takes ({', '.join(signature.parameters)}) and is called with ({arguments}), {write}"
    return ""
