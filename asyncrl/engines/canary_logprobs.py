"""The canary: one prompt on which a generation engine is compared with the trainer at every weight version.

With each version the trainer publishes the log-probs that its own weights give the likeliest next tokens after a fixed
prompt, the probe. An engine that loads the version computes the same log-probs. The largest difference is the metric
`mismatch/canary`: near 0 while engine and trainer agree, and large at once when weights, masks or precision differ.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.models.model_families import probe_tokens_needed
from asyncrl.protocols.messages import Canary

PROBE_TEXT = "The ferry left the harbour at seven, carrying three goats and a piano to the island"
"""The probe is a sentence because correct forwards agree best on likely text. On SmolLM2-135M in bfloat16 two correct
forwards differ by 0.07 nats in the mean over this sentence and wrong ones by 0.7 or more; over a row of special tokens,
which the model never saw in training, correct forwards already differ by 2.7 nats."""
PROBE_TOKENS = 12  # short enough that a forward costs next to nothing; more where a model's branches begin later
CANARY_TOKENS = 16
"""Only these likeliest tokens are compared: log-probs of unlikely tokens are large, so rounding moves them more."""


def probe_tokens(tokenizer: Any, model_config: Any, longest: int) -> NDArray[np.int64]:
    """Returns the first PROBE_TOKENS tokens of PROBE_TEXT, int64. The sentence is repeated until it is longer than each
    length below `longest`, the longest row, at which the model may compute differently. A tokenizer that maps it to few
    distinct ids, such as one that knows only letters, gets the first ids of its vocabulary instead."""
    length = probe_tokens_needed(model_config.to_dict(), PROBE_TOKENS, longest)
    ids = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"][:length]
    if len(set(ids)) < PROBE_TOKENS // 2:
        return np.arange(length, dtype=np.int64) % len(tokenizer)
    return np.resize(np.array(ids, np.int64), length)


def canary_of(probe: NDArray[np.int64], logprobs: Tensor) -> Canary:
    """Builds the canary from the trainer's log-probs [vocabulary] of the token that follows the probe."""
    values, tokens = logprobs.topk(min(CANARY_TOKENS, len(logprobs)))
    return Canary(tuple(probe.tolist()), tuple(tokens.tolist()), tuple(values.tolist()))


def canary_distance(canary: Canary, logprobs: NDArray[np.float32]) -> float:
    """Returns the largest difference, in nats, between the canary and an engine's log-probs [vocabulary]."""
    return float(np.abs(logprobs[list(canary.tokens)] - np.array(canary.logprobs)).max())
