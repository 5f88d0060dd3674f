"""The messages of an episode after its opening: what the policy said, and what the environment answered."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.environments.observation import Message
from asyncrl.protocols.batch import CUT, LATE, SPANS, Array, sampled_places

POLICY = "assistant"
CONTEXT = "context"
"""Role of the one message of an observation that begins a new context. It has `messages`, `tools`, and `follows`: the
turn whose answer the messages follow, 0 where they are a whole conversation. content: of the newest one, for a person.
"""
MESSAGE_BYTES = 64
"""Bytes that each message counts besides its text, so that many empty ones are bounded too."""
INFO = "info"
LARGEST_INFO = 512
"""Key of a message under which `info` of its observation is kept, and the bytes in JSON that it may have."""
FINISH = "finish"
"""Key of a message of the policy under which CUT or LATE says what ended it in the midst."""
OPENED = "opened"
"""Key of a message of the policy that began inside thoughts, which the prompt had opened: true, or left out."""
FAILED = "environment"
CAUSE = "error"
"""Finish reason of an episode whose environment failed; key in `info` of its last message that says why."""
CUT_OFF = "\n[cut off after {} bytes]"

Transcript = list[Message]
Quote = Callable[[Sequence[Message]], list[Message]]
"""Makes messages of an environment such that no part of them becomes a mark of a chat template."""


def read_transcript(column: Array) -> Transcript:
    messages: Transcript = json.loads(bytes(column))
    return messages


def transcript_column(messages: Transcript) -> Array:
    """Returns the column `transcript` of a row: JSON in UTF-8."""
    return np.frombuffer(json.dumps(messages, ensure_ascii=False).encode("utf-8", "replace"), np.uint8)


def policy_message(text: str, opened: bool) -> Message:
    """Returns the message of an answer of the policy. opened: whether it began inside thoughts."""
    return {"role": POLICY, "content": text} | ({OPENED: True} if opened else {})


def said_in(transcript: Transcript) -> tuple[str, ...]:
    """Returns what the policy said, turn by turn."""
    return tuple(str(message["content"]) for message in transcript if message["role"] == POLICY)


def unfinished_in(transcript: Iterable[Message]) -> tuple[int, int]:
    """Returns how many answers of the policy max_new_tokens and deadline ended, as `cut` and `late` of a RowRef."""
    ends = [message.get(FINISH) for message in transcript if message["role"] == POLICY]
    return ends.count(CUT), ends.count(LATE)


def opened_in(transcript: Transcript) -> tuple[bool, ...]:
    """Returns for each turn whether what the policy said began inside thoughts."""
    return tuple(bool(message.get(OPENED)) for message in transcript if message["role"] == POLICY)


def failure_in(transcript: Sequence[Message]) -> str:
    """Returns why the environment of an episode failed; "" where that is not known."""
    return str(transcript[-1].get(INFO, {}).get(CAUSE, "")) if transcript else ""


def answers_in(transcript: Transcript) -> list[Transcript]:
    """Returns the messages after each turn of the policy; none after the last one, if it was not answered yet."""
    found: list[Transcript] = []
    for message in transcript:
        if message["role"] == POLICY:
            found.append([])
        else:
            found[-1].append(message)
    return found


def messages_of(text: str | Sequence[Message]) -> Transcript:
    """Returns the messages of an observation; a text is one of the user."""
    return [{"role": "user", "content": text}] if isinstance(text, str) else list(text)


def context_message(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], follows: int) -> Message:
    shown = str(messages[-1]["content"]) if messages else ""
    fields = {"messages": list(messages), "tools": [dict(tool) for tool in tools], "follows": follows}
    return {"role": CONTEXT, "content": shown, **fields}


def begun_context(messages: Sequence[Message]) -> Message | None:
    """Returns the message that begins a new context, if the messages of an observation do."""
    return messages[0] if messages and messages[0]["role"] == CONTEXT else None


def begins_with_prompt(transcript: Iterable[Message], turn: int) -> bool:
    """Returns whether the context of a turn, from 1, goes back to the prompt of the sample, and not to a conversation
    that the environment began."""
    begins = True
    found = []
    for message in transcript:
        if message["role"] == POLICY:
            found.append(begins)
        elif message["role"] == CONTEXT:
            begins = message["follows"] > 0 and found[message["follows"] - 1]
    return found[turn - 1]


def conversations(
    transcript: Sequence[Message], opening: Sequence[Message], answers: Sequence[Message], quoted: Quote
) -> tuple[list[Message], list[Message]]:
    """Returns the messages that the policy saw before its newest answer, and all up to now; none where they begin with
    a text. answers: those of the policy, by turn. quoted: makes those of the environment."""
    seen: list[Message] = []
    now = list(opening)
    talks = [now]
    for message in transcript:
        if message["role"] == POLICY:
            seen = now
            answer = answers[len(talks) - 1]
            if now and now[-1]["role"] == POLICY:  # The opening has its beginning.
                now, answer = now[:-1], {**answer, "content": now[-1]["content"] + answer["content"]}
            now = [*now, answer] if seen else []
            talks.append(now)
        elif message["role"] == CONTEXT:
            follows = message["follows"]
            earlier = talks[follows] if follows else []
            now = [*earlier, *quoted(message["messages"])] if earlier or not follows else []
        elif now:
            now = [*now, *quoted([message])]
    return seen, now


def with_info(transcript: Transcript, info: Mapping[str, Any]) -> Transcript:
    """Returns the messages, the last one with `info`: the policy's, where the environment said nothing after it."""
    return [*transcript[:-1], {**transcript[-1], INFO: dict(info)}] if info else transcript


def without_info(messages: Iterable[Message]) -> Transcript:
    """Returns the messages as a model is shown them."""
    return [{key: value for key, value in message.items() if key != INFO} for message in messages]


def cut_messages(messages: Sequence[Message], most: int) -> Transcript:
    """Returns the messages of an observation, cut off with a mark after `most` bytes of UTF-8."""
    kept: Transcript = []
    left = most
    for message in messages:
        content = str(message["content"]).encode("utf-8", "replace")
        size = len(content) + max(0, _other_bytes(message) - MESSAGE_BYTES)
        if size > left or len(kept) * MESSAGE_BYTES > most:
            shown = content[:left].decode("utf-8", "ignore") + CUT_OFF.format(most)
            return [*kept, {"role": message["role"], "content": shown, **_names(message)}]
        left -= size
        kept.append({**message, "content": content.decode()})
    return kept


def _other_bytes(message: Message) -> int:
    """Returns what the fields beside the text take, roughly: texts by their characters, which costs no encoding."""
    others = {key: value for key, value in message.items() if key != "content"}
    return sum(
        len(key) + len(value if isinstance(value, str) else json.dumps(value, default=str))
        for key, value in others.items()
    )


def _names(message: Message) -> dict[str, Any]:
    """Returns the short fields that say which call of a tool a message answers."""
    return {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}


# Counts tool calls and agents' requests for metrics, from the `info` of their observations.


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


# Tells an environment what the engine recorded of an answer: its tokens, their log-probs, why it ended.


TOKENIZER = "tokenizer.json"
SPACE = "\u2581"
FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
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

    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    text_of = token_texts(folder)
    added = tokenizer.get_added_tokens_decoder()
    decoder = repr(tokenizer.decoder)

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
    spans = columns[SPANS]
    response = columns["response_ids"]
    ids = response[sampled_places(spans)].tolist()
    texts = [text_of(token) for token in ids]
    logprobs = columns["logprobs"].tolist()
    contexts = _context_sizes(len(columns["prompt_ids"]), spans)
    said = [message for message in read_transcript(columns["transcript"]) if message["role"] == POLICY]
    found = []
    first = 0
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
    sizes = []
    size = prompt
    for sampled, given in spans.reshape(-1, 2).tolist():
        sizes.append(size)
        size = -given if given < 0 else size + sampled + given
    return sizes
