"""The work of the gate for one sample does not depend on how many are in flight: instructions of Python are counted."""

import random
from collections import deque
from typing import Any

import pytest

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.gate.gate import Gate
from asyncrl.protocols.staleness import Policy
from tests.instruction_count import counting

MEMBERS = 4
POLICIES: tuple[Policy, ...] = ("mask", "drop", "block", "admit")


def instructions_per_sample(policy: Policy, groups: int, *, starved: bool = False) -> float:
    """Counts the instructions of a schedule in which answers arrive in random order, with every question at each.

    groups: of a step; three times as many are in flight. starved: one group never ends, so that some policies wait.
    """
    gate = Gate(GateConfig(groups, MEMBERS, 2, policy, slots=8 * groups, cut_at=2, need_signal=True))
    rng = random.Random(1)
    running = list[tuple[int, int]]()
    training = deque[Any]()

    def answer(group: int, member: int) -> None:
        gate.generated(group, member, 0, max(0, gate.version - 1), gate.version, 1)
        gate.scored(group, member, 0, float((group % 8 and member) > 1))
        assert gate.oldest <= group
        assert gate.held() <= gate.config.credits
        gate.preview()
        if not training and gate.worth_picking and (cuts := gate.pick().cuts) is not None:
            training.append(cuts)

    def play(steps: int) -> int:
        samples = 0
        for _ in range(steps * groups):
            while gate.may_draw():
                group = gate.draw()
                if not (starved and group == 0):
                    running.extend((group, member) for member in range(MEMBERS))
            for _ in range(min(MEMBERS, len(running))):
                place = rng.randrange(len(running))
                running[place], running[-1] = running[-1], running[place]
                answer(*running.pop())
                samples += 1
            if training and rng.random() < 8 / groups:
                gate.trained(training.popleft(), gate.version + 1)
        return samples

    play(2)
    with counting() as counted:
        samples = play(1)
    return counted.instructions / samples


CASES = [*((policy, False) for policy in POLICIES), ("mask", True), ("block", True)]


@pytest.mark.parametrize(("policy", "starved"), CASES)
def test_work_for_a_sample_is_the_same_with_eight_times_as_many_in_flight(policy: Policy, starved: bool) -> None:
    few, many = (instructions_per_sample(policy, groups, starved=starved) for groups in (8, 64))
    assert many <= 1.5 * few, f"{few:.0f} instructions a sample, {many:.0f} with eight times as many in flight"
