"""Colours the tokens of samples by advantage, reward, log-prob or the age of the weights that sampled them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.schema import Config
from asyncrl.telemetry.sample_panel import PLAIN, SpecialTokens
from asyncrl.telemetry.samples_file import SampleRecord

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TOKENS = 300
"""Tokens of a sample that are shown; those in its middle are left out."""
Decode = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token. about: what the page says when a reader points at it. masked: whether its age left it out of the loss.
    by_advantage, by_reward, by_logprob, by_age: CSS colours."""

    text: str
    about: str
    masked: bool
    by_advantage: str
    by_reward: str
    by_logprob: str
    by_age: str


def _tokenizer_of(folders: Sequence[Path]) -> "Tokenizer | None":
    """Returns the tokenizer of the first of the folders that has one."""
    path = next((path for folder in folders if (path := folder / "tokenizer.json").is_file()), None)
    if path is None:
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def special_tokens(folders: Sequence[Path]) -> SpecialTokens:
    """Returns what shows answers with their special tokens, by the first of the folders with a tokenizer."""
    if (tokenizer := _tokenizer_of(folders)) is None:
        return PLAIN
    names = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    return SpecialTokens(lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)), tuple(names))


def token_decoder(folders: Sequence[Path]) -> Decode | None:
    """Returns a function that decodes a token, by the first of the folders with a tokenizer; None without one. A token
    alone loses the space before it in some tokenizers, so it is decoded after another one."""
    if (tokenizer := _tokenizer_of(folders)) is None:
        return None
    known: dict[int, str] = {}

    def decode(token: int) -> str:
        if token not in known:
            pair = tokenizer.decode([token, token], skip_special_tokens=False)
            once = tokenizer.decode([token], skip_special_tokens=False)
            known[token] = pair[len(once) :] if pair.startswith(once) else once
        return known[token]

    return decode


def shown_tokens(record: SampleRecord, decode: Decode, config: Config) -> list[ShownToken]:
    """Returns the tokens of a sample, at most MAX_TOKENS and a gap between them. A step trains the weights of the
    version before it, so the age of a token is counted from there."""
    trained_version = record.step - 1
    numbers = zip(record.token_ids, record.token_logprobs, record.token_versions, *_by_token(record), strict=True)
    found = []
    for token, logprob, version, advantage, reward in numbers:
        age = trained_version - version
        masked = not config.staleness.rule.live(version, trained_version, config.staleness.limit)
        found.append(
            ShownToken(
                decode(token),
                f"{json.dumps(decode(token))} ({token}), log-prob {logprob:.3f}, version {version}"
                + ("" if advantage is None else f", advantage {advantage:+.3f}")
                + (f", reward {reward:+.3f}" if reward else "")
                + (", masked: too old" if masked else ""),
                masked,
                signed_colour(advantage or 0.0, full=2.0),
                signed_colour(reward or 0.0, full=1.0),
                signed_colour(logprob, full=5.0),
                f"rgba(59,125,216,{0.6 * min(1.0, max(0, age) / max(1, config.staleness.limit)):.2f})",
            )
        )
    half = MAX_TOKENS // 2
    return found if len(found) <= MAX_TOKENS else [*found[:half], _gap(len(found) - 2 * half), *found[-half:]]


def _by_token(record: SampleRecord) -> tuple[Sequence[float | None], Sequence[float | None]]:
    """Returns advantages and rewards of the tokens. Where those of tokens are not recorded, all have the advantage of
    the sample, and the last one has its reward."""
    count = len(record.token_ids)
    rewards: Sequence[float | None] = record.token_rewards or [*[None] * (count - 1), record.reward][:count]
    return record.token_advantages or [record.advantage] * count, rewards


def _gap(tokens: int) -> ShownToken:
    return ShownToken(f" [{tokens} tokens] ", "not shown", False, *["transparent"] * 4)


def signed_colour(value: float, full: float) -> str:
    """Returns green for a value above 0 and red for one below it, strongest from `full` on."""
    if not value:
        return "transparent"
    colour = "42,157,85" if value > 0 else "209,73,91"
    return f"rgba({colour},{min(1.0, abs(value) / full) * 0.6:.2f})"
