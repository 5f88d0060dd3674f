"""How samples of a run ended, by length."""

import re
from collections import Counter

import pytest

from asyncrl.controller.gate.group_state import EndedSample, SampleState, Stage
from asyncrl.controller.gate.length_report import LengthReport, by_tenth


def ended(tokens: int, reason: str = "") -> EndedSample:
    return EndedSample(0, 0, tokens, 0, 0, 0, reason)


@pytest.mark.trap("short_first")
def test_the_end_of_a_run_tells_by_length_what_was_trained_dropped_and_abandoned() -> None:
    lengths = LengthReport()
    lengths.add([ended(tokens) for tokens in range(1, 9) for _ in range(2)])
    lengths.add([ended(9), ended(9, "stale"), ended(0, "poison")])
    running = [SampleState(Stage.RUNNING, tokens=0)] * 3
    waiting = [SampleState(Stage.READY, tokens=40), SampleState(Stage.SCORING, tokens=90)]
    told = str(lengths.report([*running, *waiting, SampleState(Stage.TRAINED, tokens=1)]))
    assert "up to 1 2 3 4 5 6 7 8 9 90 tokens" in told
    shares = {end: re.search(rf"{end} ([\d% ]+)", told)[1].split() for end in ("trained", "dropped", "abandoned")}  # type: ignore[index]
    assert shares["trained"] == ["100%"] * 8 + ["50%", "0%"]
    assert shares["dropped"] == ["0%"] * 8 + ["50%", "0%"]
    assert shares["abandoned"] == ["0%"] * 9 + ["100%"]
    assert '3 more were still being sampled (finish = "drain"' in told


def test_a_run_that_leaves_nothing_says_nothing_of_it_and_a_tiny_one_nothing_at_all() -> None:
    lengths = LengthReport()
    lengths.add([ended(3)] * 9)
    assert lengths.report([]) is None
    lengths.add([ended(3)])
    assert str(lengths.report([])).endswith("abandoned 0% 0% 0% 0% 0% 0% 0% 0% 0% 0%")


def test_samples_of_one_length_are_shared_out_over_tenths() -> None:
    tenths = by_tenth({5: Counter(trained=12, abandoned=3), 6: Counter(trained=5)})
    assert [longest for longest, _ in tenths] == [5] * 7 + [6] * 3
    assert tenths[0][1] == pytest.approx({"trained": 0.8, "dropped": 0.0, "abandoned": 0.2})
    assert tenths[7][1] == pytest.approx({"trained": 0.9, "dropped": 0.0, "abandoned": 0.1})
    assert sum(shares["abandoned"] for _, shares in tenths) == pytest.approx(3 / 2)
