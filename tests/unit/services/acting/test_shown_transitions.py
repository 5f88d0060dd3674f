"""Transitions as a person reads them."""

import numpy as np

from asyncrl.engines.acting.stepping.spaces import ActionSpace, Spaces
from asyncrl.services.acting_generation import shown_transitions

COLUMNS = {
    "observations": np.array([1.23456, 2, 3, 4, 5, 6], np.float32),
    "actions": np.array([0.0, 9.0, -9.0], np.float32),
    "logprobs": np.array([-0.5, -1.0, -2.0], np.float32),
    "rewards": np.array([1.0, 0.0, 2.5], np.float32),
    "terminated": np.array([0, 1, 0], np.uint8),
    "truncated": np.array([0, 0, 1], np.uint8),
    "versions": np.array([3, 3, 4], np.int32),
}


def test_actions_of_a_box_are_shown_as_the_environment_got_them() -> None:
    spaces = Spaces(2, ActionSpace("box", 1, low=(-2.0,), high=(4.0,), shape=(1,)))
    first, second, third = shown_transitions(COLUMNS, spaces, 9)
    assert first == {"observation": [1.235, 2.0], "action": [1.0], "logprob": -0.5, "reward": 1.0, "version": 3}
    assert (second["action"], second["ended"]) == ([4.0], "terminated")
    assert (third["action"], third["ended"], third["version"]) == ([-2.0], "truncated", 4)


def test_discrete_actions_begin_where_their_space_does() -> None:
    columns = {**COLUMNS, "actions": np.array([0.0, 1.0, 2.0], np.float32)}
    shown = shown_transitions(columns, Spaces(2, ActionSpace("discrete", 3, start=-1)), 2)
    assert [each["action"] for each in shown] == [-1, 0]
