"""The cost of the staleness limit, on samples whose numbers can be counted by hand."""

from collections import Counter

import pytest

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import EndedSample, SampleState, Stage
from asyncrl.controller.observers.staleness_report import (
    StalenessReport,
    by_tenth,
    deciles,
    live_tokens,
    smallest_limit,
    tokens_trained,
)
from asyncrl.protocols.messages import TrainedSample

MASK = GateConfig(groups=1, members=2, limit=1, policy="mask", slots=4)
DROP = GateConfig(groups=1, members=2, limit=1, policy="drop", slots=4)


def ended(tokens: int, trained: int, first: int, version: int = 4, last: int = 4) -> EndedSample:
    return EndedSample(0, 0, tokens, first, last, version, "" if trained else "stale", trained=trained)


def short(count: int) -> list[EndedSample]:
    return [ended(5, 5, first=4) for _ in range(count)]


def test_shares_are_taken_by_decile_of_length() -> None:
    parts = deciles([*short(18), ended(100, 40, first=0), ended(300, 0, first=0)])
    assert [sum(sample.trained > 0 for sample in part) for part in parts] == [2] * 9 + [1]
    assert tokens_trained(parts[-1]) == pytest.approx(40 / 400)
    assert parts[-1][-1].tokens == 300


def test_fewer_samples_than_deciles_say_nothing() -> None:
    assert deciles(short(9)) == []
    assert smallest_limit(short(9), MASK) is None


def test_tokens_are_live_by_the_version_they_were_sampled_at() -> None:
    sample = EndedSample(0, 0, tokens=50, first=0, last=4, version=4)
    assert [live_tokens(sample, limit) for limit in range(5)] == [10, 20, 30, 40, 50]


def test_the_limit_that_lets_half_of_the_longest_train_is_named() -> None:
    samples = [*short(9), ended(50, 20, first=0)]
    assert smallest_limit(samples, MASK) == 2, "three of five versions within two of the trainer's"
    assert smallest_limit(samples, DROP) == 4, "a sample is dropped for its first token"


def test_no_larger_limit_is_named_when_age_is_not_the_reason() -> None:
    assert smallest_limit([*short(9), ended(50, 0, first=4)], MASK) is None


def test_a_step_reports_what_left_the_gate_since_the_last() -> None:
    gate = Gate(MASK)
    report = StalenessReport(MASK)
    gate.draw()
    for member in range(2):
        gate.generated(0, member, 0, 0, 0, tokens=10)
        gate.scored(0, member, 0, float(member))
    pick = gate.pick()
    assert pick.cuts is not None
    gate.trained(pick.cuts, 1)
    gate.draw()
    gate.generated(1, 0, 0, 1, 1, tokens=7)
    gate.restart(1, [0])
    metrics = report.step(gate, [TrainedSample(0, 0, 0, 10, 0), TrainedSample(0, 1, 0, 6, 4, "stale")])
    assert metrics == {
        "staleness/expired": 0,
        "staleness/cut_fraction": 0,
        "staleness/cut_baseline_gap": 0,
        "staleness/wasted_tokens": 4 + 7,
    }
    assert report.step(gate, [])["staleness/wasted_tokens"] == 0


@pytest.mark.parametrize(("first", "told"), [(0, "staleness.limit = 2 is the smallest"), (3, None)])
def test_a_run_that_masks_most_of_its_longest_completions_is_told_the_limit_to_take(
    first: int, told: str | None
) -> None:
    report = StalenessReport(MASK)
    gate = Gate(MASK)
    gate.ended.extend(EndedSample(0, 0, 5, 4, 4, 4) for _ in range(9))
    gate.ended.append(EndedSample(1, 0, 40, first, 4, 4))
    assert report.advice() is None
    report.step(gate, [TrainedSample(1, 0, 0, 16, 24, "stale"), TrainedSample(0, 0, 0, 5, 0)])
    advice = report.advice()
    assert advice is None if told is None else told in str(advice)
    assert told is None or "longer than 5 tokens trained 40% of their tokens" in str(advice)


@pytest.mark.trap("redone")
def test_samples_that_were_sampled_again_are_told_by_length() -> None:
    gate = Gate(GateConfig(groups=5, members=2, limit=1, policy="mask", slots=20))
    report = StalenessReport(MASK)
    for group in range(5):
        gate.draw()
        again = gate.restart(group, [1]) if group >= 3 else 0
        for member, attempt in ((0, 0), (1, again)):
            assert gate.generated(group, member, attempt, 0, 0, tokens=1 + 2 * group + member)
            assert gate.scored(group, member, attempt, float(member))
    gate.trained(gate.pick().cuts or (), 1)
    metrics = report.step(gate, [])
    redone = [metrics[f"staleness/redone/d{number}"] for number in range(1, 11)]
    assert redone == [0.0] * 7 + [1.0, 0.0, 1.0]


@pytest.mark.trap("redone")
def test_nothing_is_said_of_redone_samples_when_there_are_none() -> None:
    gate = Gate(MASK)
    report = StalenessReport(MASK)
    gate.ended.extend(EndedSample(0, 0, 5, 4, 4, 4) for _ in range(20))
    assert not [name for name in report.step(gate, []) if "redone" in name]


def reported(samples: list[EndedSample]) -> StalenessReport:
    gate = Gate(MASK)
    report = StalenessReport(MASK)
    gate.ended.extend(samples)
    report.step(gate, [])
    return report


def ending(tokens: int, reason: str = "") -> EndedSample:
    return EndedSample(0, 0, tokens, 0, 0, 0, reason)


@pytest.mark.trap("short_first")
def test_the_end_of_a_run_tells_by_length_what_was_trained_dropped_and_abandoned() -> None:
    pairs = [ending(tokens) for tokens in range(1, 9) for _ in range(2)]
    report = reported([*pairs, ending(9), ending(9, "stale"), ending(0, "poison")])
    running = [SampleState(Stage.RUNNING, tokens=0)] * 3
    waiting = [SampleState(Stage.READY, tokens=40), SampleState(Stage.SCORING, tokens=90)]
    text = report.length_bias([*running, *waiting, SampleState(Stage.TRAINED, tokens=1)])
    assert text == (
        "of the longest tenth of the completions (9 to 90 tokens) 0% were trained, 0% dropped and 100% abandoned at "
        "the end; of the shortest tenth (up to 1 tokens) 100% were trained; "
        'finish = "drain" trains what is in flight at the end'
    )
    dropped = reported([*pairs, ending(9), ending(9, "stale")]).length_bias([])
    assert "50% were trained, 50% dropped and 0% abandoned" in str(dropped)


@pytest.mark.parametrize(("longest", "news"), [(5, False), (6, True)])
def test_lengths_that_hardly_differ_are_no_news(longest: int, news: bool) -> None:
    report = reported([ending(4)] * 80 + [ending(longest)] * 10)
    waiting = [SampleState(Stage.READY, tokens=longest)] * 10
    assert (report.length_bias(waiting) is not None) == news


def test_without_news_about_lengths_nothing_is_said() -> None:
    assert reported([ending(3)] * 9).length_bias([]) is None
    assert reported([ending(tokens) for tokens in range(1, 11)]).length_bias([]) is None
    assert reported([ending(tokens, "stale") for tokens in range(1, 11)]).length_bias([]) is None


def test_samples_of_one_length_are_shared_out_over_tenths() -> None:
    tenths = by_tenth({5: Counter(trained=12, abandoned=3), 6: Counter(trained=5)})
    assert [longest for longest, _ in tenths] == [5] * 7 + [6] * 3
    assert tenths[0][1] == pytest.approx({"trained": 0.8, "dropped": 0.0, "abandoned": 0.2})
    assert tenths[7][1] == pytest.approx({"trained": 0.9, "dropped": 0.0, "abandoned": 0.1})
    assert sum(shares["abandoned"] for _, shares in tenths) == pytest.approx(3 / 2)
