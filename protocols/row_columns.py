"""The columns of the rows that services store, with their dtypes and, for given numbers of tokens, their lengths."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, tuple[np.dtype[Any], int]]
"""Column -> dtype and length."""

SPANS = "spans"
"""The column that tells sampled tokens from given ones, only in rows of episodes."""

EXPERTS = "experts"
"""The column of the experts that routers chose, only with `training.router_replay`."""

TOKEN_REWARDS = "token_rewards"
"""The column of rewards of single tokens, only where reward functions give them and a critic is trained."""

IDS, NUMBERS, BYTES, COUNT = (np.dtype(name) for name in ("<i4", "<f4", "u1", "<i8"))


def sample_columns(prompt: int, response: int, text: int) -> Columns:
    """Returns what generation stores of a sample. text: bytes of the completion."""
    return {
        "prompt_ids": (IDS, prompt),
        "response_ids": (IDS, response),
        "logprobs": (NUMBERS, response),
        "versions": (IDS, response),
        "text": (BYTES, text),
    }


def trajectory_columns(turns: int, transcript: int) -> Columns:
    """Returns what the row of an episode has besides. spans: for each turn, the tokens sampled and those given after
    it; response_ids has all of them, in order, and every other column of tokens has one entry for a sampled token. A
    negative number of given tokens: these begin a new context, in which the policy sees nothing of before. transcript:
    bytes of the messages after the prompt, as JSON. turn_rewards: of the environment."""
    return {SPANS: (IDS, 2 * turns), "transcript": (BYTES, transcript), "turn_rewards": (NUMBERS, turns)}


def expert_columns(tokens: int, dtype: np.dtype[Any], width: int) -> Columns:
    """Returns what generation stores of the experts of a row: `width` numbers for each token of prompt and response, as
    asyncrl/engines/experts/record_shape.py has them."""
    return {EXPERTS: (dtype, tokens * width)}


def sampled_places(spans: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns the indices of the sampled tokens in `response_ids`, int64 [sampled]."""
    return np.flatnonzero(np.repeat(np.arange(len(spans)) % 2 == 0, np.abs(spans)))


def episode_columns(prompt: int, response: int, text: int, turns: int, transcript: int) -> Columns:
    """Returns what the environment stores of a sample."""
    return sample_columns(prompt, response, text) | trajectory_columns(turns, transcript)


def reference_columns(response: int) -> Columns:
    return {"reference_logprobs": (NUMBERS, response)}


def token_reward_columns(response: int) -> Columns:
    """Returns what the reward service stores: the parts of a reward that belong to single sampled tokens."""
    return {TOKEN_REWARDS: (NUMBERS, response)}


def restored_columns(prompt: int, response: int, text: int) -> Columns:
    """Returns what generation stores at most of a sample that a resume restores: the columns of all services."""
    own = sample_columns(prompt, response, text) | reference_columns(response) | token_reward_columns(response)
    values = value_columns("values", "valued_at", response)
    return own | values | value_columns("cost_values", "cost_valued_at", response)


def value_columns(values: str, valued_at: str, response: int) -> Columns:
    """Returns what a critic stores: a value for each token, and the number of its updates before."""
    return {values: (NUMBERS, response), valued_at: (COUNT, 1)}
