"""Each policy of staleness says what is live, what expires, and how much may be in flight."""

from typing import get_args

import numpy as np
import pytest
import torch

from asyncrl.protocols.staleness import POLICIES, Policy


def test_every_policy_has_its_facts() -> None:
    assert tuple(POLICIES) == get_args(Policy)


@pytest.mark.parametrize(
    ("name", "old_is_live", "expires", "capacity"),
    [("mask", False, 5, 15), ("drop", False, 3, 12), ("block", False, None, 12), ("admit", True, None, 12)],
)
def test_what_a_policy_says(name: Policy, old_is_live: bool, expires: int | None, capacity: int) -> None:
    policy = POLICIES[name]
    stamps = [3, 4, 5, 9]
    expected = [old_is_live, old_is_live, True, True]
    assert [policy.live(each, version=7, limit=2) for each in stamps] == expected
    assert policy.live(np.array(stamps), 7, 2).tolist() == expected
    assert policy.live(np.array(stamps), 7, 2).dtype == np.bool_
    assert policy.live(torch.tensor(stamps), 7, 2).tolist() == expected
    assert policy.expires(first=3, last=5) == expires
    assert policy.capacity(limit=2, groups=4, decoding=3) == capacity
