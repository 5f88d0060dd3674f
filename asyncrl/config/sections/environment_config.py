"""The section `[environment]` of a config."""

from typing import Any, Literal

from pydantic import Field

from asyncrl.config.sections.algorithm_config import Positive, PositiveFloat, Section


class EnvironmentConfig(Section):
    """The environment that answers the policy, for samples of several turns."""

    use: str = ""
    """Environment of an episode: a built-in name, `FILE.py:Class`, `tools`, `agent:COMMAND`, or `gymnasium:`,
    `textarena:`, `mcp:`, `openenv:` or `verifiers:` with a name. Default: none, each sample is one
    answer to its prompt."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the environment."""
    max_turns: Positive = 8
    """Largest number of turns of the policy in an episode."""
    max_tokens: Positive = 1024
    """Largest number of tokens of an episode after its prompt, those of observations included."""
    max_seconds: PositiveFloat = 600.0
    """Seconds that the environment may take for all its answers in an episode. An episode that takes longer ends
    with `time_limit`."""
    max_bytes: Positive = 16384
    """Largest size of an observation, in UTF-8 bytes. The rest is cut off."""
    deadline: PositiveFloat = 10.0
    """Seconds that one call of `reset` or `step` may take."""
    on_error: Literal["fail", "zero", "ignore"] = "fail"
    """Effect of an environment that raises, hangs or dies: `fail` ends the run, `zero` ends the episode and gives 0 for
    that turn, `ignore` leaves the sample out of the baseline and the loss. With the last two, a group for which `reset`
    fails is dropped."""
    replicas: Positive = 1
    """Number of environment workers, each with its own child processes."""
    pool: str = ""
    """Pool of the environment workers, a table of `pools`, whose hosts may join."""
    workers: Positive = 1
    """Number of child processes of each replica. Each plays many episodes at once."""
