"""Functions of the user beside templates: each in children of its kind, and results in the order of the functions."""

import asyncio
from pathlib import Path

import pytest

from asyncrl.children.containment import Containment, files_named
from asyncrl.errors import ConfigError
from asyncrl.rewards.execution.child_pool import ChildPool, MakePool, SplitPool
from asyncrl.rewards.functions import FunctionSpec
from tests.unit.children.running import running
from tests.unit.rewards.execution.pools import sample

FUNCTIONS = "import os\ndef number(sample): return os.getpid()\ndef parent(sample): return os.getppid()\n"


def specs(file: Path, *names: str) -> list[FunctionSpec]:
    uses = {"own": "asyncrl.tasks.builtin.reverse:copied"}
    return [FunctionSpec(uses.get(name, f"{file}:{name}"), name) for name in names]


def maker(folder: Path, tasks: asyncio.TaskGroup) -> MakePool:
    def make(specs: list[FunctionSpec], containment: Containment | None) -> ChildPool:
        limits = {"workers": 1, "deadline": 20.0, "start_deadline": 60.0, "printed": folder / "printed"}
        return ChildPool(specs, tasks, containment=containment, **limits)

    return make


async def test_only_functions_of_the_user_are_contained(tmp_path: Path) -> None:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    chosen = specs(file, "number", "own", "parent")
    containment = Containment(visible=files_named([str(file)]))

    async with running(lambda tasks: SplitPool(chosen, containment, maker(tmp_path, tasks))) as pool:
        assert [spec.name for spec in pool.specs] == ["number", "own", "parent"]
        found = [(await pool.run(function, [sample("four", answer="ruof")]))[0].value for function in range(3)]
        assert found[0] == 2, "the guard is process 1 of its own space"
        assert found[1:] == [1.0, 1.0]
        assert (pool.finished, pool.queued) == (3, 0)


async def test_functions_of_one_kind_share_their_children(tmp_path: Path) -> None:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    async with running(lambda tasks: SplitPool(specs(file, "number", "own"), None, maker(tmp_path, tasks))) as pool:
        assert len(pool._pools) == 1


async def test_a_kind_that_cannot_start_ends_the_other(tmp_path: Path) -> None:
    chosen = specs(tmp_path / "missing.py", "own", "number")
    with pytest.raises(ExceptionGroup) as raised:
        async with running(lambda tasks: SplitPool(chosen, Containment(), maker(tmp_path, tasks))):
            pass
    assert raised.group_contains(ConfigError, match="there is no file")
