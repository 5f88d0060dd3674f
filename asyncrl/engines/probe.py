"""Tokens over which two forwards of one model are compared."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

PROBE_TEXT = "The ferry left the harbour at seven, carrying three goats and a piano to the island"
"""Over special tokens, which it has never seen in a row, two right forwards of SmolLM2-135M in bfloat16 differ by 2.7
nats in the mean; over a sentence by 0.07, and wrong ones by 0.7 and more."""
PROBE_TOKENS = 12
"""Few enough to cost nothing."""


def probe_ids(tokenizer: Any) -> NDArray[np.int64]:
    """The first tokens of a sentence; where they are few different ones, as in a vocabulary of letters alone, the first
    of the vocabulary."""
    ids = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"][:PROBE_TOKENS]
    if len(set(ids)) < PROBE_TOKENS // 2:
        return np.arange(PROBE_TOKENS, dtype=np.int64) % len(tokenizer)
    return np.resize(np.array(ids, np.int64), PROBE_TOKENS)
