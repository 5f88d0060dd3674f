"""Conversations of people as prompts: the sets of the packages `chitchat-dataset` and `chatterbot-corpus`.

    [hello, hi, how are you?, fine, and you?]  ──>  prompt: user hello / assistant hi / user how are you?
                                                    answer: fine      lines of the user that follow: and you?

One conversation in eight is held out, chosen by a checksum of its text.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.config.install_hints import install_extra
from asyncrl.errors import TaskError

SETS = ("chatterbot", "chitchat")
LONGEST_LINE = 200
"""Characters of a line, beyond which a conversation is left out: a few lines fit into the context of a small model."""
HELD_OUT_SHARE = 8


@dataclass(frozen=True, slots=True)
class RowMaker:
    """Makes rows of conversations, see `training`. held_out: those that are never trained on."""

    held_out: bool

    def __call__(
        self,
        size: int = 1000,
        seed: int = 0,
        sets: Sequence[str] = SETS,
        given: int = 3,
        following: int = 2,
    ) -> list[dict[str, Any]]:
        if not sets or set(sets) - set(SETS):
            raise TaskError(f"task.options: sets = {list(sets)}; write one or more of {', '.join(SETS)}")
        if given < 1 or following < 0:
            raise TaskError(f"task.options: given = {given}, following = {following}; write 1 or more, and 0 or more")
        source = random.Random(seed)
        cut = _Cut(given, following)
        found = {name: [each for each in conversations(name) if is_held_out(each) == self.held_out] for name in sets}
        return [cut.row(source, source.choice(found[sets[number % len(sets)]])) for number in range(size)]


training = RowMaker(held_out=False)
"""Makes `size` rows. sets: where from, in equal parts. given: most lines of a prompt, the last one the user's.
following: most further lines of the user, for the environment `dialogue`. The same seed gives the same rows."""
held_out = RowMaker(held_out=True)
"""Makes rows like those of `training`, of conversations that are never trained on."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """Says what a row has of a conversation, see `training`."""

    given: int
    following: int

    def row(self, source: random.Random, lines: Sequence[str]) -> dict[str, Any]:
        """Cuts a conversation before an answer. What follows the answer is left to the environment."""
        shown = source.randint(1, min(self.given, len(lines) - 1))
        start = source.randint(0, len(lines) - 1 - shown)
        end = start + shown
        if shown % 2 == 0:
            start += 1  # The user speaks last, and chat templates want the user to begin.
        said = [
            {"role": ("user", "assistant")[number % 2], "content": line} for number, line in enumerate(lines[start:end])
        ]
        return {"prompt": said, "answer": lines[end], "lines": list(lines[end + 1 :: 2][: self.following])}


def is_held_out(lines: Sequence[str]) -> bool:
    return hashlib.sha256("\n".join(lines).encode()).digest()[0] % HELD_OUT_SHARE == 0


@cache
def conversations(name: str) -> list[tuple[str, ...]]:
    """Returns the conversations of a set, each of two lines or more. Raises TaskError when its package is missing."""
    read = {"chatterbot": _chatterbot, "chitchat": _chitchat}[name]
    cleaned = (tuple(" ".join(line.split()) for line in lines) for lines in read())
    return [
        lines
        for lines in dict.fromkeys(cleaned)
        if len(lines) > 1 and all(0 < len(line) <= LONGEST_LINE for line in lines)
    ]


def _chitchat() -> Iterator[list[str]]:
    """Reads conversations of strangers (BYU, 2018); what one of them writes in a row is one line."""
    path = package_folder("chitchat_dataset", "chitchat-dataset") / "dataset.json"
    for conversation in json.loads(path.read_bytes()).values():
        yield [" ".join(said["text"] for said in turn) for turn in conversation["messages"]]


def _chatterbot() -> Iterator[list[str]]:
    """Reads the English questions and answers, and short talks, of ChatterBot's corpus."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if it was built
    folder = package_folder("chatterbot_corpus", "chatterbot-corpus") / "data" / "english"
    for path in sorted(folder.glob("*.yml")):
        for lines in yaml.load(path.read_bytes(), loader)["conversations"]:
            yield [str(line) for line in lines]


def package_folder(module: str, package: str) -> Path:
    """Returns the folder of a package of data, without importing it. Raises TaskError when it is not installed."""
    found = find_spec(module)
    if found is None or found.origin is None:
        raise TaskError(f"task.prompts: {package} is not installed; run: {install_extra('dialogue')}")
    return Path(found.origin).parent
