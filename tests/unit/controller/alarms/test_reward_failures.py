import pytest

from asyncrl.controller.alarms.reward_failures import RewardFailures
from asyncrl.controller.observers.events import SampleScored
from asyncrl.errors import RewardError
from asyncrl.protocols.batch import RowRef
from asyncrl.protocols.messages import Score

ROW = RowRef(0, 0, 0, 0, 1, 1, 0, 0, "stop", ())


def scored(score: Score) -> SampleScored:
    return SampleScored(ROW, score)


FAILED = scored(Score(None, {}, "reward function f on member 0 of group 0: it returned None"))


def test_the_first_failure_is_said_once() -> None:
    said: list[str] = []
    failures = RewardFailures(10, said.append)
    for _ in range(3):
        failures.observe(FAILED)
    assert failures.failed.total == 3
    assert len(said) == 1
    assert "function f on member 0" in said[0]


def test_it_names_the_logs_of_the_service_that_failed() -> None:
    for service in ("reward", "cost"):
        said: list[str] = []
        failed = scored(Score(None, {}, f"{service} function f on member 0 of group 0: it hung"))
        RewardFailures(10, said.append).observe(failed)
        assert f"logs/{service}*.jsonl" in said[0]


def test_a_run_that_can_score_nothing_ends() -> None:
    failures = RewardFailures(3, lambda text: None)
    failures.observe(FAILED)
    failures.observe(FAILED)
    failures.observe(scored(Score(1.0, {})))
    failures.observe(FAILED)
    failures.observe(FAILED)
    with pytest.raises(RewardError, match="last 3 samples"):
        failures.observe(FAILED)
