from dataclasses import replace
from typing import Any

import pytest

from asyncrl.errors import RewardError
from asyncrl.protocols.messages import Score
from asyncrl.rewards import Sample
from asyncrl.rewards.execution.scoring import score_of
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import FunctionResult

SAMPLE = Sample("p", "wrong " * 100, {}, group=12, member=3, finish="stop", tokens=1)
SPECS = [FunctionSpec("exact_match", "match", weight=2.0), FunctionSpec("my.py:shape", "shape", weight=0.5)]
BROKEN = [FunctionResult(1.0), FunctionResult(reason="it raised KeyError: 'x'", traceback="Traceback ...\n")]


def test_the_weighted_sum_with_each_functions_own_value() -> None:
    assert score_of(SAMPLE, SPECS, [FunctionResult(1.0), FunctionResult(-1.0)], "fail") == Score(
        1.5, {"match": 1.0, "shape": -1.0}
    )


def test_named_terms_are_summed() -> None:
    score = score_of(SAMPLE, SPECS, [FunctionResult(1.0), FunctionResult({"a": 1.0, "b": 3.0})], "fail")
    assert score == Score(4.0, {"match": 1.0, "shape/a": 1.0, "shape/b": 3.0})


def test_fail_names_function_sample_and_traceback() -> None:
    with pytest.raises(RewardError) as raised:
        score_of(SAMPLE, SPECS, BROKEN, "fail")
    message = str(raised.value)
    assert "reward function my.py:shape on member 3 of group 12: it raised KeyError: 'x'" in message
    assert "completion: 'wrong wrong" in message
    assert "Traceback ..." in message
    assert message.endswith(
        'correct my.py:shape first; where single samples cannot be scored, reward.on_error = "zero" or "ignore" lets '
        "the run go on"
    )
    assert len(message) < 600


def test_what_no_code_of_the_user_did_has_no_advice_to_correct_it() -> None:
    with pytest.raises(RewardError, match=r'\nreward\.on_error = "zero"'):
        score_of(SAMPLE, SPECS, [FunctionResult(reason="there is no answer"), FunctionResult(1.0)], "fail")


@pytest.mark.parametrize(("samples", "named"), [(16, "the 16 samples"), (1, "the only sample")])
def test_a_group_that_failed_together_is_named_without_a_member(samples: int, named: str) -> None:
    broken = [FunctionResult(1.0), FunctionResult(reason="it hung", failed_together=samples)]
    message = score_of(SAMPLE, SPECS, broken, "zero", "held-out prompt 33").error
    assert message == f"reward function my.py:shape on {named} of held-out prompt 33: it hung"


@pytest.mark.trap("unscorable")
def test_zero_counts_the_function_as_zero_and_says_so() -> None:
    score = score_of(SAMPLE, SPECS, BROKEN, "zero")
    assert (score.reward, score.terms) == (2.0, {"match": 1.0, "shape": 0.0})
    assert "my.py:shape" in score.error


@pytest.mark.trap("unscorable")
def test_ignore_makes_the_sample_unscorable_not_zero() -> None:
    score = score_of(SAMPLE, SPECS, BROKEN, "ignore")
    assert score.reward is None
    assert score.terms == {"match": 1.0}
    assert "my.py:shape" in score.error


@pytest.mark.parametrize(("weight", "turns"), [(2.0, (0.0, 0.5)), (0.0, ())])
def test_the_rewards_of_an_environment_are_parts_of_the_score(weight: float, turns: tuple[float, ...]) -> None:
    specs = [FunctionSpec("exact_match", "right"), FunctionSpec("environment", "environment", weight)]
    episode = replace(SAMPLE, turn_rewards=[0.0, 0.25])
    score = score_of(episode, specs, [FunctionResult(1.0), FunctionResult(0.25)], "fail")
    assert (score.reward, score.turns) == (1.0 + weight * 0.25, turns)
    assert score_of(episode, specs[:1], [FunctionResult(1.0)], "fail").turns == ()
    failed = [FunctionResult(1.0), FunctionResult(reason="raised")]
    assert score_of(episode, specs, failed, "zero").turns == ()


@pytest.mark.parametrize("on_error", ["fail", "zero", "ignore"])
@pytest.mark.parametrize("own", ["", "fail", "zero"])
def test_a_row_that_cannot_be_scored_leaves_the_run_whatever_a_key_says_of_errors(on_error: Any, own: str) -> None:
    specs = [replace(SPECS[0], on_error=own), SPECS[1]]
    bad = [FunctionResult(reason="the row's answer holds no number", of_row=True), FunctionResult(1.0)]
    score = score_of(SAMPLE, specs, bad, on_error)
    assert (score.reward, score.bad_row, score.terms) == (None, True, {"shape": 1.0})
    assert "exact_match on member 3 of group 12: the row's answer holds no number" in score.error
    assert not score_of(SAMPLE, SPECS, [FunctionResult(1.0), FunctionResult(1.0)], on_error).bad_row


def test_an_error_of_the_users_function_still_ends_the_run_beside_a_bad_row() -> None:
    with pytest.raises(RewardError, match="it raised KeyError"):
        score_of(SAMPLE, SPECS, [FunctionResult(reason="no number", of_row=True), BROKEN[1]], "fail")
