"""Observations of several messages are cut at one size for all of them, and add to metrics what happened, once."""

import pytest

from asyncrl.environments.transcript import CUT_OFF, counted_metrics, cut_messages, turn_counts


def test_messages_share_the_bytes_of_an_observation() -> None:
    first, second, third = ({"role": "user", "content": letter * 100} for letter in "abc")
    assert cut_messages([first, second], 200) == [first, second]
    assert cut_messages([first, second, third], 150) == [first, {**second, "content": "b" * 50 + CUT_OFF.format(150)}]


def test_empty_messages_are_bounded_too() -> None:
    empty = {"role": "user", "content": ""}
    assert cut_messages([empty] * 1000, 130) == [empty, empty, empty, {**empty, "content": CUT_OFF.format(130)}]


POLICY = {"role": "assistant", "content": "a"}


def test_tools_count_each_answer_alone() -> None:
    before = [POLICY, {"role": "tool", "content": "4", "info": {"calls": 3, "failed_calls": 1}}, POLICY]
    found = turn_counts("mcp:server", before, {"calls": 2, "failed_calls": 0})
    assert found == {"environment/tool_calls": 2.0, "environment/failed_tool_calls": 0.0}


@pytest.mark.parametrize(("now", "added"), [(7, 3.0), (4, 0.0), (1, 0.0)])
def test_an_agent_counts_since_its_episode_began(now: int, added: float) -> None:
    """An agent that was played again may have sent fewer requests."""
    before = [POLICY, {"role": "user", "content": "b", "info": {"requests": 4, "branches": 1}}, POLICY]
    found = turn_counts("agent:python agent.py", before, {"requests": now, "branches": 2})
    assert (found["environment/requests"], found["environment/branches"]) == (added, 1.0)
    assert turn_counts("agent:python agent.py", [POLICY], {"requests": 2})["environment/requests"] == 2.0


def test_the_info_of_other_environments_is_not_counted() -> None:
    assert turn_counts("mine.py:Mine", [POLICY], {"calls": 5}) == {}
    assert counted_metrics("guess") == ()
    assert counted_metrics("tools") == ("environment/tool_calls", "environment/failed_tool_calls")
