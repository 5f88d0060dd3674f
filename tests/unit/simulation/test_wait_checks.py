"""How long a group may be in flight before a trial fails, without faults and after one."""

import asyncio
import random

import pytest

from asyncrl.controller.observers.events import GroupFinished
from asyncrl.simulation import virtual_loop
from asyncrl.simulation.faults.fault_injection import AGE_LIMIT, AGE_LIMIT_PER_FAULT, FaultInjection
from asyncrl.simulation.faults.trial_execution import WaitChecks
from asyncrl.simulation.faults.trial_plan import Fault, Trial
from asyncrl.simulation.faults.trial_services import GroundTruth

ANOTHER = GroupFinished(8)
LOSE = Fault("lose", 1)


def reach_age(seconds: float, *injected: Fault) -> None:
    """Lets group 7 be in flight for so many seconds after these faults. Raises AssertionError when that is too long."""

    async def main() -> None:
        trial = Trial()
        faults = FaultInjection(trial, GroundTruth(trial, random.Random(0)))
        checks = WaitChecks(faults, [7])
        faults.injected += injected
        await asyncio.sleep(seconds)
        checks.observe(ANOTHER)

    virtual_loop.run(main())


@pytest.mark.parametrize("faults", [(), (LOSE,), (LOSE, LOSE)])
def test_each_fault_lengthens_the_age_that_a_group_may_reach(faults: tuple[Fault, ...]) -> None:
    limit = AGE_LIMIT + AGE_LIMIT_PER_FAULT * len(faults)
    reach_age(limit, *faults)
    with pytest.raises(AssertionError, match=f"group 7 has been in flight for {limit + 1:g} s"):
        reach_age(limit + 1, *faults)


def test_a_finished_group_has_no_age() -> None:
    async def main() -> None:
        trial = Trial()
        checks = WaitChecks(FaultInjection(trial, GroundTruth(trial, random.Random(0))), [7])
        checks.observe(GroupFinished(7))
        await asyncio.sleep(2 * AGE_LIMIT)
        checks.observe(ANOTHER)

    virtual_loop.run(main())
