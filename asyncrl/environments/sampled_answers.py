"""Tells an environment what the engine recorded of an answer: its tokens, their log-probs, why it ended."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.environments.transcript import FINISH, POLICY, read_transcript
from asyncrl.protocols.batch import Array
from asyncrl.protocols.row_columns import SPANS, sampled_places

TOKENIZER = "tokenizer.json"
UNKNOWN = "token_id:{}"
"""Text of a token whose tokenizer is not in a file of its own."""


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """Describes an answer of the policy. tokens: the text of each sampled token alone. logprobs: of each, as the engine
    sampled it. finish: "stop", "stop_string" or "length". context: tokens of the conversation before it."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    finish: str
    context: int


def token_texts(folder: Path) -> Callable[[int], str]:
    """Returns what tells the text of a token of the tokenizer in a model folder. It reads the folder and computes."""
    if not (folder / TOKENIZER).exists():
        return UNKNOWN.format
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    return cache(lambda token: str(tokenizer.decode([token], skip_special_tokens=False)))


def sampled_answers(columns: Mapping[str, Array], finish: str, text_of: Callable[[int], str]) -> list[dict[str, Any]]:
    """Returns the fields of a SampledAnswer for each turn of a row. finish: of the newest; that of earlier ones is in
    the transcript."""
    spans, response = columns[SPANS], columns["response_ids"]
    texts = [text_of(token) for token in response[sampled_places(spans)].tolist()]
    logprobs, contexts = columns["logprobs"].tolist(), _context_sizes(len(columns["prompt_ids"]), spans)
    said = [message for message in read_transcript(columns["transcript"]) if message["role"] == POLICY]
    found, first = [], 0
    for turn, size in enumerate(spans[::2].tolist()):
        own = slice(first, first + size)
        ended = finish if 2 * turn + 2 == len(spans) else "length" if FINISH in said[turn] else "stop"
        found.append({"tokens": texts[own], "logprobs": logprobs[own], "finish": ended, "context": contexts[turn]})
        first += size
    return found


def _context_sizes(prompt: int, spans: NDArray[np.int32]) -> list[int]:
    """Returns the tokens that the policy saw before each turn."""
    sizes, size = [], prompt
    for sampled, given in spans.reshape(-1, 2).tolist():
        sizes.append(size)
        size = -given if given < 0 else size + sampled + given
    return sizes
