"""Pools of real children that run functions from a file."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl.rewards import Sample
from asyncrl.rewards.execution.child_pool import ChildPool
from asyncrl.rewards.functions import FunctionSpec
from tests.unit.children.running import running

MakePool = Callable[..., AbstractAsyncContextManager[ChildPool]]


def sample(text: str = "four", member: int = 0, **row: Any) -> Sample:
    return Sample("p", text, row, group=3, member=member, finish="stop", tokens=1)


def pool_of_file(file: Path, tasks: asyncio.TaskGroup, start: float = 60.0) -> ChildPool:
    """Makes a pool of one child for the function `f` of this file. The test starts and stops it."""
    spec = FunctionSpec(f"{file}:f", "f")
    printed = file.with_suffix(".printed")
    return ChildPool([spec], tasks, workers=1, deadline=20.0, start_deadline=start, printed=printed)


def pools(functions: str, folder: Path) -> MakePool:
    """Makes pools of the functions of this source that are named."""
    file = folder / "functions.py"
    file.write_text(functions)

    @asynccontextmanager
    async def make(
        *names: str,
        group: bool = False,
        workers: int = 1,
        deadline: float = 20.0,
        start: float = 60.0,
        first_failure_only: bool = False,
        variables: tuple[str, ...] = (),
    ) -> AsyncIterator[ChildPool]:
        specs = [FunctionSpec(f"{file}:{name}", name, group=group) for name in names]
        options: dict[str, Any] = {"workers": workers, "deadline": deadline, "start_deadline": start}
        options |= {
            "printed": folder / "reward0.printed",
            "first_failure_only": first_failure_only,
            "variables": variables,
        }
        async with running(lambda tasks: ChildPool(specs, tasks, **options)) as made:
            yield made

    return make
