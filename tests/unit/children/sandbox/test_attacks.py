"""Every attack is contained and reported as what it was, and neighbours in the same pool pass."""

import asyncio

import pytest

from asyncrl.children.sandbox import CaseResult, Program, SandboxPool, TestCase
from tests.unit.children.sandbox.attacks import ATTACKS, Attack
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


def test_there_are_enough_attacks() -> None:
    assert len(ATTACKS) > 40
