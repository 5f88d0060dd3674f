"""Which of the faults of a message is injected, and what is expected of its worker afterwards."""

import random

from asyncrl.simulation import virtual_loop
from asyncrl.simulation.faults.fault_injection import FaultInjection
from asyncrl.simulation.faults.trial_execution import run_trial
from asyncrl.simulation.faults.trial_plan import Fault, Trial
from asyncrl.simulation.faults.trial_services import GroundTruth

LOSE = Fault("lose", 3, seconds=0.5)
OVERTAKE = Fault("overtake", 3, seconds=20.0)


def test_of_two_faults_of_a_message_only_the_last_is_injected() -> None:
    async def main() -> FaultInjection:
        trial = Trial(faults=(LOSE, OVERTAKE))
        injection = FaultInjection(trial, GroundTruth(trial, random.Random(0)))
        met = [injection.fault_of_message("inproc://reward0.0-0-00000001.work", 8) for _ in range(4)]
        assert met == [None, None, OVERTAKE, None]
        return injection

    assert virtual_loop.run(main()).injected == [OVERTAKE]


def test_nothing_is_expected_of_a_worker_for_a_fault_that_was_not_injected() -> None:
    shape = {"groups": 1, "members": 2, "cut_at": None, "limit": 0, "slots": 1, "steps": 3}
    slow = {"latency": 0.1, "flip_time": 0.3, "step_time": 2.0, "reward_time": 0.0}
    trial = Trial(seed=44412, **shape, **slow, finish="drain", reference=True, faults=(LOSE, OVERTAKE))
    assert run_trial(trial).ends == ["finished"]
