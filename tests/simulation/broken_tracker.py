"""Mistakes in the tracker that both simulations have to find."""

from typing import Any

import pytest

from asyncrl.controller.sample_tracker import SampleTracker


def a_drop_is_not_journaled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SampleTracker, "_dropped", lambda tracker, state, members, reason: tracker._free(state, members))


def trained_is_told_before_it_is_written_down(patch: pytest.MonkeyPatch) -> None:
    """At every second version the record is not written at all."""
    whole = SampleTracker.trained

    def trained(tracker: SampleTracker, cuts: Any, version: int, advantages: Any, chain: str) -> None:
        if version % 2:
            whole(tracker, cuts, version, advantages, chain)
        else:
            tracker.gate.trained(cuts, version)

    patch.setattr(SampleTracker, "trained", trained)
