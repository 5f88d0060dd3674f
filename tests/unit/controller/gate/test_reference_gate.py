"""The gate answers from indexes; a plain gate that scans everything in flight gives the same answers on random runs."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.gate.gate import Gate
from tests.named_seed import named_seed, starts
from tests.unit.controller.gate.reference_gate import ReferenceGate
from tests.unit.controller.gate.world import World

SCHEDULES = 20
"""Random schedules for each policy; the job nightly runs ten times as many."""
CHANGES = ("draw", "restore", "stop_drawing", "generated", "scored", "compared", "restart", "drop", "pick", "requeue")
ANSWERS = ("version", "next_group", "counts", "oldest", "awaited", "exhausted", "held", "may_draw", "preview")
AFTER_STEPS = ("groups", "ended", "gaps", "abandoned_tokens")


class PairedGate:
    """Hands every call to a gate and to the reference, and compares what they answer and what they then know."""

    def __init__(self, config: GateConfig, version: int = 0, next_group: int = 0) -> None:
        self._pair = Gate(config, version, next_group), ReferenceGate(config, version, next_group)

    def __getattr__(self, name: str) -> Any:
        fast, slow = (getattr(gate, name) for gate in self._pair)
        if not callable(fast):
            assert fast == slow, f"{name} is {fast}, not {slow}"
            return fast

        def call(*arguments: Any) -> Any:
            of_reference = copy.deepcopy(arguments) if name == "restore" else arguments
            answer = fast(*arguments)
            expected = slow(*of_reference)
            assert answer == expected, f"{name} answers {answer}, not {expected}"
            if name in (*CHANGES, "trained"):
                self.compare(ANSWERS)
            if name == "trained":
                self.compare(AFTER_STEPS)
            return answer

        return call

    def compare(self, names: Iterable[str]) -> None:
        for name in names:
            fast, slow = (getattr(gate, name) for gate in self._pair)
            if callable(fast):
                fast = fast()
                slow = slow()
            assert fast == slow, f"{name} is {fast}, not {slow}"


POLICIES = ("mask", "drop", "block", "admit")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("first", starts(SCHEDULES, 10 * SCHEDULES, SCHEDULES))
def test_the_gate_answers_as_the_reference_does(policy: str, first: int) -> None:
    for seed in range(first, first + SCHEDULES):
        with named_seed(seed):
            World(seed, PairedGate, policy=policy).run()


@pytest.mark.parametrize("policy", POLICIES)
def test_large_schedules_answer_as_the_reference_does(policy: str) -> None:
    World(0, PairedGate, policy=policy, groups=12, members=6, limit=5, slots=200).run()
