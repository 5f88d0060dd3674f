"""Tells an environment what the engine recorded of an answer: its tokens, their log-probs, why it ended."""

import re
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
SPACE, FALLBACK = "\u2581", re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A space, and a token that is one byte, in vocabularies of SentencePiece."""
TextOf = Callable[[int], str]
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted({*range(256)} - {*_SHOWN})
BYTES = {chr(byte): bytes([byte]) for byte in _SHOWN} | {chr(256 + n): bytes([byte]) for n, byte in enumerate(_OTHERS)}
"""The byte for which each character of a byte-level vocabulary stands (GPT-2, Radford et al. 2019)."""
UNKNOWN = "token_id:{}"
"""Text of a token whose tokenizer is not in a file of its own."""


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """Describes an answer of the policy. tokens: the text of each sampled token alone. logprobs: of each, as the engine
    sampled it. finish: "stop", "stop_string" or "length". context: tokens of the conversation before it. pieces: the
    bytes of each token, as characters of latin-1; (): those of its text."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    finish: str
    context: int
    pieces: tuple[str, ...] = ()

    @property
    def token_bytes(self) -> list[bytes]:
        """Returns the bytes of each token, which may be a part of a character."""
        return [piece.encode("latin-1") for piece in self.pieces] or [token.encode() for token in self.tokens]


def token_texts(folder: Path) -> Callable[[int], str]:
    """Returns what tells the text of a token of the tokenizer in a model folder. It reads the folder and computes."""
    if not (folder / TOKENIZER).exists():
        return UNKNOWN.format
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    return cache(lambda token: str(tokenizer.decode([token], skip_special_tokens=False)))


def token_pieces(folder: Path) -> Callable[[int], str] | None:
    """Returns what tells the bytes of a token between others, as characters of latin-1, also of one that is a part of a
    character, of the tokenizer in a model folder; None without a file of it."""
    if not (folder / TOKENIZER).exists():
        return None
    from tokenizers import Tokenizer

    tokenizer, text_of = Tokenizer.from_file(str(folder / TOKENIZER)), token_texts(folder)
    added, decoder = tokenizer.get_added_tokens_decoder(), repr(tokenizer.decoder)

    def own(token: int) -> bytes:
        written = tokenizer.id_to_token(token) or ""
        if token in added:
            return str(added[token].content).encode()
        if "ByteLevel(" in decoder:
            return b"".join(BYTES[each] if each in BYTES else each.encode() for each in written)
        if "ByteFallback(" in decoder and (byte := FALLBACK.fullmatch(written)):
            return bytes([int(byte[1], 16)])
        return (written.replace(SPACE, " ") if SPACE in decoder else text_of(token)).encode()

    return cache(lambda token: own(token).decode("latin-1"))


def sampled_answers(
    columns: Mapping[str, Array], finish: str, text_of: TextOf, pieces_of: TextOf | None = None
) -> list[dict[str, Any]]:
    """Returns the fields of a SampledAnswer for each turn of a row. finish: of the newest; that of earlier ones is in
    the transcript."""
    spans, response = columns[SPANS], columns["response_ids"]
    ids = response[sampled_places(spans)].tolist()
    texts = [text_of(token) for token in ids]
    logprobs, contexts = columns["logprobs"].tolist(), _context_sizes(len(columns["prompt_ids"]), spans)
    said = [message for message in read_transcript(columns["transcript"]) if message["role"] == POLICY]
    found, first = [], 0
    for turn, size in enumerate(spans[::2].tolist()):
        own = slice(first, first + size)
        ended = finish if 2 * turn + 2 == len(spans) else "length" if FINISH in said[turn] else "stop"
        found.append({"tokens": texts[own], "logprobs": logprobs[own], "finish": ended, "context": contexts[turn]})
        if pieces_of is not None:
            found[-1]["pieces"] = [pieces_of(token) for token in ids[own]]
        first += size
    return found


def _context_sizes(prompt: int, spans: NDArray[np.int32]) -> list[int]:
    """Returns the tokens that the policy saw before each turn."""
    sizes, size = [], prompt
    for sampled, given in spans.reshape(-1, 2).tolist():
        sizes.append(size)
        size = -given if given < 0 else size + sampled + given
    return sizes
