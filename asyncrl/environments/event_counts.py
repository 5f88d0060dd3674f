"""Counts tool calls and agents' requests for metrics, from the `info` of their observations."""

from collections.abc import Mapping
from typing import Any

from asyncrl.environments.transcript import INFO, Transcript

FAILED_EPISODES = "environment/failed_episodes"
"""Metric of episodes whose environment failed, which environment.on_error lets pass."""
OF_AN_ANSWER = {"calls": "environment/tool_calls", "failed_calls": "environment/failed_tool_calls"}
"""Metrics by the keys in `info` of tools, which count what one answer of the policy called."""
OF_AN_EPISODE = {
    "requests": "environment/requests",
    "repeated": "environment/repeated_requests",
    "rewritten": "environment/rewritten_histories",
    "branches": "environment/branches",
}
"""Metrics by the keys in `info` of agents, which count since the episode began."""
COUNTED = {"tools": OF_AN_ANSWER, "mcp": OF_AN_ANSWER, "agent": OF_AN_EPISODE, "verifiers": OF_AN_EPISODE}
"""Metrics of the environments whose `info` is known, by the name before a colon."""


def counted_metrics(use: str) -> tuple[str, ...]:
    """Returns the names of the metrics that an environment counts."""
    return tuple(COUNTED.get(use.partition(":")[0], {}).values())


def turn_counts(use: str, before: Transcript, info: Mapping[str, Any]) -> dict[str, float]:
    """Returns what one turn adds to the metrics of an environment. before: the messages up to that turn. info: of the
    observation that answers it. An agent that was played again may count less than before; that adds nothing."""
    names = COUNTED.get(use.partition(":")[0], {})
    last: Mapping[str, Any] = next((message[INFO] for message in reversed(before) if INFO in message), {})
    known = last if names is OF_AN_EPISODE else {}
    return {metric: max(0.0, float(info.get(key, 0)) - float(known.get(key, 0))) for key, metric in names.items()}
