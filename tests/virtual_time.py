"""Tests that run on virtual time, some of them inside a scene that is built and taken down around them."""

import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Concatenate, ParamSpec, TypeVar

from asyncrl.simulation import virtual_loop

T = TypeVar("T")
Given = ParamSpec("Given")


def on_virtual_time(test: Callable[Given, Coroutine[Any, Any, None]]) -> Callable[Given, None]:
    @functools.wraps(test)
    def run(*args: Given.args, **given: Given.kwargs) -> None:
        virtual_loop.run(test(*args, **given))

    return run


def within(
    scene: Callable[[], AbstractAsyncContextManager[T]],
) -> Callable[[Callable[Concatenate[T, Given], Coroutine[Any, Any, None]]], Callable[Given, None]]:
    """Runs a test on virtual time inside the scene, which it gets first; its other arguments are pytest's."""

    def decorate(test: Callable[Concatenate[T, Given], Coroutine[Any, Any, None]]) -> Callable[Given, None]:
        @functools.wraps(test)
        def run(*args: Given.args, **given: Given.kwargs) -> None:
            async def play() -> None:
                async with scene() as here:
                    await test(here, *args, **given)

            virtual_loop.run(play())

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
        return run

    return decorate
