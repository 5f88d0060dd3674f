"""Every attack is contained and reported as what it was, and neighbours in the same pool pass."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from asyncrl.children.sandbox import CaseResult, Limits, Program, SandboxPool, TestCase, memory_groups, single_sandbox
from tests.unit.children.sandbox.attacks import ATTACKS, FULL, REFUSED_WITHOUT_GROUP, UNSEEN, Attack
from tests.unit.children.sandbox.conftest import SECRET, Outside

NEIGHBOUR = Program(
    "def double(x): return 2 * x\nif __name__ == '__main__': print(double(int(input())))",
    (TestCase("calls", "assert double(4) == 8"), TestCase("prints", stdin="4", stdout="8")),
)


async def attacked(pool: SandboxPool, attack: Attack, outside: Outside) -> CaseResult:
    test = TestCase("attack", attack.code, stdout=attack.printed)
    (result,) = await pool.run_all(Program(outside.of(attack.source), (test,)), attack.limits)
    return result


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_is_contained_and_reported(name: str, outside: Outside, pool: SandboxPool) -> None:
    attack = ATTACKS[name]
    result, *neighbours = await asyncio.gather(attacked(pool, attack, outside), pool.run_all(NEIGHBOUR))
    after = await pool.run_all(NEIGHBOUR)
    said = f"{result.stdout[:2000]}\n{result.stderr[:4000]}\n{result.detail}"
    assert result.outcome == attack.outcome, said
    assert attack.said in said
    assert SECRET not in said
    assert not outside.visited()
    assert [each.outcome for each in (*neighbours[0], *after)] == ["passed"] * 4


@pytest.mark.parametrize("name", UNSEEN)
async def test_the_kernel_limits_memory_that_no_process_shows(name: str, outside: Outside, pool: SandboxPool) -> None:
    if (why := memory_groups.home()[1]) != "":
        pytest.skip(f"no memory cgroup can be made here: {why}")
    result, neighbours = await asyncio.gather(attacked(pool, UNSEEN[name], outside), pool.run_all(NEIGHBOUR))
    assert result.outcome == "memory"
    assert [each.outcome for each in neighbours] == ["passed"] * 2


MEMORY = [name for name, attack in ATTACKS.items() if attack.outcome == "memory" and "shared" not in name]


@pytest.fixture
async def pool_without_groups(bubblewrap_works: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SandboxPool]:
    monkeypatch.setattr(single_sandbox, "new_group", lambda: None)
    async with SandboxPool(2, limits=Limits(seconds=30, disk_bytes=4 * 2**20)) as pool:
        yield pool


@pytest.mark.parametrize("name", [*MEMORY, *UNSEEN, *FULL])
async def test_where_there_is_no_cgroup(name: str, outside: Outside, pool_without_groups: SandboxPool) -> None:
    """Looks at processes see all memory that a program can have."""
    attack = {**ATTACKS, **UNSEEN, **FULL}[name]
    outcome, said = REFUSED_WITHOUT_GROUP.get(name, (attack.outcome, ""))
    result = await attacked(pool_without_groups, attack, outside)
    assert result.outcome == outcome, result
    assert said in result.stderr + result.detail


async def test_tcp_is_refused_where_nothing_counts_its_buffers(pool_without_groups: SandboxPool) -> None:
    program = Program("import socket\nsocket.socket()", (TestCase("tcp"),))
    (result,) = await pool_without_groups.run_all(program)
    assert "not supported" in result.stderr


async def test_what_a_class_is_called_does_not_reach_a_terminal(pool: SandboxPool) -> None:
    program = Program("def f(): return type('\\x1b[2J', (), {})()", (TestCase("calls", "assert f() == 4"),))
    (result,) = await pool.run_all(program)
    assert result.outcome == "failed"
    assert "\x1b" not in result.detail
    assert "\\x1b[2J" in result.detail


async def test_groups_are_gone_with_their_sandboxes(pool: SandboxPool) -> None:
    folder, why = memory_groups.home()
    if folder is None:
        pytest.skip(f"no memory cgroup can be made here: {why}")
    made = f"asyncrl-sandbox-{os.getpid()}-*"
    await pool.run_all(NEIGHBOUR)
    assert list(folder.glob(made))
    await pool.__aexit__(None, None, None)
    assert not list(folder.glob(made))


def test_there_are_enough_attacks() -> None:
    assert len(ATTACKS) > 40
