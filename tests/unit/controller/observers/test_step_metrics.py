"""One object a step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.controller.observers.step_metrics import (
    WorkerMetrics,
    batch_metrics,
    equal_texts,
    report_metrics,
    step_of,
)
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.messages import Health, SampleText, StepReport, TrainedSample
from asyncrl.telemetry.jsonl import LineFile, read_metrics
from asyncrl.telemetry.samples_file import SampleRecord, sample_record


def row(member: int, tokens: int, reward: float | None, finish: str = "stop") -> RowRef:
    return RowRef(0, member, 0, 0, 5, tokens, 0, 0, finish, (), reward)


def health(instance: str, wall: float, **seconds: float) -> Health:
    return Health("generation", 0, 0, instance, (), 0, seconds, wall)


def test_a_resumed_run_counts_each_step_once(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "metrics.jsonl")
    for incarnation, step in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (1, 4)):
        file.append({"step": step, "incarnation": incarnation})
    file.close()
    kept = [(line["incarnation"], line["step"]) for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert kept == [(0, 1), (1, 2), (1, 3), (1, 4)]


def test_a_step_that_is_tried_again_counts_once_and_leaves_the_one_before_it(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "metrics.jsonl")
    for report in (StepReport(0, 5, 1, "", "00", {}, (), None), StepReport(0, 5, 0, "not finite", "00", {}, (), None)):
        file.append({"step": step_of(report), "incarnation": 0})
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [5, 6]
    file.append({"step": step_of(StepReport(0, 6, 1, "", "00", {}, (), None)), "incarnation": 0, "grad_norm": 1.0})
    file.close()
    assert [line.get("grad_norm") for line in read_metrics(tmp_path / "metrics.jsonl")] == [None, 1.0]


def rows_of(groups: dict[int, tuple[Any, ...]], **field: str) -> BatchRef:
    """Returns samples by group. field: what the values are, else rewards."""
    rows = []
    for group, values in groups.items():
        for member, value in enumerate(values):
            each = row(member, 5, 1.0 if field else value)._replace(group=group)
            rows.append(each._replace(**{field["field"]: value}) if field else each)
    return BatchRef(tuple(rows))


def test_a_batch_of_all_right_and_all_wrong_groups_spreads_and_teaches_nothing() -> None:
    rows = rows_of({0: (1.0, 1.0), 1: (0.0, 0.0), 2: (0.0, 1.0), 3: (None, 1.0)})
    found = batch_metrics(rows)
    assert found["reward/std"] > 0.45
    assert found["reward/group_std"] == 0.5 / 3
    assert found["reward/equal_groups"] == pytest.approx(2 / 3)
    assert "reward/equal_groups" not in batch_metrics(BatchRef(rows.rows[::2])), "one sample of each"


@pytest.mark.parametrize(("discount", "equal"), [(None, 1.0), (0.9, 1 / 3), (1.0, 2 / 3), (0.0, 1 / 3)])
def test_groups_whose_turns_differ_are_equal_by_their_totals_alone(discount: float | None, equal: float) -> None:
    parts = {0: ((1.0, 0.0), (0.0, 1.0)), 1: ((0.5, 0.5), (0.5, 0.5)), 2: ((), (0.0, 1.0))}
    found = batch_metrics(rows_of(parts, field="turn_rewards"), turn_discount=discount)
    assert found["reward/equal_groups"] == pytest.approx(equal)


def record(group: int, member: int, *said: str, turns: bool = True) -> SampleRecord:
    given = [{"role": "assistant", "content": each} for each in said] if turns else []
    text = SampleText(group, member, "p", said[-1], turns=given)
    sample = row(member, 5, 1.0)._replace(group=group)
    return sample_record(1, sample, text, {}, TrainedSample(group, member, 0, 5, 0))


def test_recorded_groups_of_one_text_are_counted_of_episodes_by_all_their_answers() -> None:
    texts = {(0, 0): "a", (0, 1): "a", (1, 0): "a", (1, 1): "b", (2, 0): "c"}
    records = [record(*key, text, turns=False) for key, text in texts.items()]
    assert equal_texts(records) == {"completions/equal_groups": 0.5}
    assert equal_texts(records[-1:]) == {}
    episodes = [record(0, 0, "a", "z"), record(0, 1, "b", "z"), record(1, 0, "a", "z"), record(1, 1, "a", "z")]
    assert equal_texts(episodes) == {"completions/equal_groups": 0.5}


@pytest.mark.trap("truncated")
def test_batch_metrics() -> None:
    found = batch_metrics(BatchRef((row(0, 10, 1.0), row(1, 20, 0.0, "length"), row(2, 30, None))))
    assert found["reward/mean"] == 0.5
    assert found["reward/std"] == 0.5
    assert found["completions/length_mean"] == 20
    assert found["completions/truncated_fraction"] == pytest.approx(1 / 3)
    assert math.isnan(batch_metrics(BatchRef(()))["reward/mean"])
    assert not [name for name in found if name.startswith("episodes/")]


def test_batch_metrics_of_episodes_say_how_long_they_are_and_why_they_ended() -> None:
    ends = (("stop", 3, 12), ("turn_limit", 8, 40), ("environment", 1, 0), ("stop", 2, 8))
    rows = [row(m, 10, 1.0, end)._replace(turns=turns, given=given) for m, (end, turns, given) in enumerate(ends)]
    found = batch_metrics(BatchRef(tuple(rows)), episodes=True)
    assert (found["episodes/turns_mean"], found["episodes/given_tokens_mean"]) == (3.5, 15)
    assert {name: share for name, share in found.items() if name.startswith("episodes/finish/")} == {
        "episodes/finish/environment": 0.25,
        "episodes/finish/stop": 0.5,
        "episodes/finish/turn_limit": 0.25,
    }
    assert (found["completions/length_mean"], found["completions/truncated_fraction"]) == (10, 0.0)


@pytest.mark.parametrize("end", ["stop", "turn_limit", "token_limit", "time_limit", "environment"])
def test_turns_that_were_cut_off_truncate_an_episode_whatever_ended_it(end: str) -> None:
    counts = ({"cut": 1}, {"cut": 3}, {"late": 2}, {})
    rows = [row(m, 10, 1.0, end)._replace(turns=4, **each) for m, each in enumerate(counts)]
    found = batch_metrics(BatchRef(tuple(rows)), episodes=True)
    assert (found["completions/truncated_fraction"], found["completions/late_fraction"]) == (0.5, 0.25)
    assert found["episodes/cut_turns_mean"] == 1


def test_an_answer_that_its_deadline_ended_is_late_and_not_truncated() -> None:
    found = batch_metrics(BatchRef((row(0, 10, 1.0, "length")._replace(late=1), row(1, 20, 0.0, "length"))))
    assert (found["completions/truncated_fraction"], found["completions/late_fraction"]) == (0.5, 0.5)


@pytest.mark.trap("masked_denominators")
def test_report_metrics_turn_masks_into_shares_and_tokens_into_a_rate() -> None:
    samples = (
        TrainedSample(0, 0, 0, trained=30, masked=10, reason="stale"),
        TrainedSample(0, 1, 0, trained=0, masked=20, reason="truncated"),
        TrainedSample(0, 2, 0, trained=30, masked=0, rejected=10),
    )
    report = StepReport(0, 5, 1, "", "00", {"grad_norm": 0.5, "staleness/max": 2.0}, samples, None)
    found = report_metrics(report, seconds=2.0)
    assert found["mask/stale_fraction"] == 0.1
    assert found["mask/truncated_fraction"] == 0.2
    assert found["perf/tokens_per_s"] == 30
    assert (found["version"], found["grad_norm"], found["staleness/max"]) == (5, 0.5, 2.0)


def test_time_shares_are_of_the_time_since_the_last_look_and_add_up() -> None:
    shares = WorkerMetrics()
    shares.since_last([health("a", 10.0, busy=9.0)])
    other = replace(health("b", 4.0, busy=4.0), replica=1)
    found = shares.since_last([health("a", 20.0, busy=12.0, starved=6.0), other])
    assert found["time/generation/busy"] == pytest.approx((0.3 + 1.0) / 2)
    assert found["time/generation/starved"] == pytest.approx(0.3)
    assert found["time/generation/unaccounted"] == pytest.approx(0.05)
    assert sum(value for name, value in found.items() if name.startswith("time/")) == pytest.approx(1.0)


def test_a_restarted_worker_is_counted_from_its_own_start_and_one_that_did_not_answer_from_its_last_answer() -> None:
    shares = WorkerMetrics()
    shares.since_last([health("a", 100.0, busy=100.0)])
    found = shares.since_last([health("a2", 2.0, busy=1.0)])
    assert found["time/generation/busy"] == pytest.approx(0.5)
    assert shares.since_last([]) == {}
    assert shares.since_last([health("a2", 12.0, busy=2.0)])["time/generation/busy"] == pytest.approx(0.1)


def test_counts_of_environments_are_those_since_the_last_line() -> None:
    metrics = WorkerMetrics()
    name = "environment/tool_calls"

    def calls(*workers: tuple[str, int, float]) -> float:
        healths = [
            Health(
                "environment", replica, 0, instance, (), 2, {}, 1.0, {"answers": 9.0, "environment/tool_calls": made}
            )
            for instance, replica, made in workers
        ]
        found = metrics.since_last(healths)
        assert found["perf/queued/environment"] == 2 * len(workers)
        return found[name]

    assert calls(("a", 0, 5.0), ("b", 1, 1.0)) == 6.0
    assert calls(("b", 1, 3.0)) == 2.0, "the other did not answer"
    assert calls(("a", 0, 7.0), ("b2", 1, 4.0)) == 6.0


def test_what_a_person_was_asked_is_told_as_the_worker_counts_it() -> None:
    metrics = WorkerMetrics()
    for _ in range(2):
        asked = Health("reward", 0, 0, "a", (), 0, {}, 1.0, {"feedback/asked": 3.0})
        assert metrics.since_last([asked])["feedback/asked"] == 3.0


def test_what_is_unknown_is_named(unknown_metrics: Callable[[Mapping[str, object]], list[str]]) -> None:
    known = ("reward/f/term", "time/critic/busy", "data/dropped/not finite", "sampling/accepted/d3", "grad_norm")
    assert unknown_metrics(dict.fromkeys((*known, "mistake", "time/critic", "policy/ess2"), 0.0)) == [
        "mistake",
        "time/critic",
        "policy/ess2",
    ]
