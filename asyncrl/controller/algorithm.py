"""An algorithm as the controller runs it, and the attribution of errors to a user's algorithm."""

import inspect
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.controller.rollouts import Attempt
from asyncrl.errors import AlgorithmError, AsyncrlError, root_cause
from asyncrl.fleet.fleet import Fleet

if TYPE_CHECKING:
    from asyncrl.controller.controller import Controller


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm: two plain async functions.

    roll_out(fleet, control, group) returns when every sample of the group was handed to `control.ready`; it may be
    cancelled and called again. train(fleet, control) returns when `control.iterations()` ends. name: of a user's
    algorithm, whose errors are attributed to it; empty for the algorithms of asyncrl.
    """

    roll_out: Callable[[Fleet, "Controller", Attempt], Awaitable[None]]
    train: Callable[[Fleet, "Controller"], Awaitable[None]]
    name: str = ""

    def attribution(self, function: Literal["roll_out", "train"]) -> AbstractContextManager[None]:
        """Returns the scope to call this function in."""
        if not self.name:
            return nullcontext()
        return AttributedTo(f"{function} of {self.name}", getattr(self, function))


@dataclass(frozen=True, slots=True)
class AttributedTo:
    """Turns an error raised inside the scope into an AlgorithmError that names the user's function and the line.

    Errors of asyncrl itself and timeouts pass unchanged: a lost worker is no fault of the algorithm. what: the function
    in messages.
    """

    what: str
    function: Callable[..., Any]

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            return
        cause = root_cause(error)
        if isinstance(cause, AlgorithmError):
            raise AlgorithmError(f"{self.what}: {cause}{self._line(cause)}") from cause
        if isinstance(cause, Exception) and not isinstance(cause, AsyncrlError | TimeoutError):
            raise AlgorithmError(f"{self.what} raised {type(cause).__name__}: {cause}{self._line(cause)}") from cause

    def _line(self, cause: Exception) -> str:
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        frames = traceback.extract_tb(cause.__traceback__)
        own = [frame for frame in frames if code is not None and frame.filename == code.co_filename] or frames[-1:]
        return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
