"""The printer of all commands: what a model, a host or a run directory said reaches a terminal as text, never as
commands of it. Colours of asyncrl's own are styles of rich, and no part of a text."""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0d\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)
"""Characters that move, colour or rename: all controls but line ends and tabs, those that turn the direction of text,
those that are not seen (but for the joiners of letters and the two selectors of emoji), and halves of characters, which
no terminal takes."""
RETURN = re.compile("\r(?=\n)")


def cleaned(text: str) -> str:
    """Returns a text with what would command a terminal written as Python writes it, such as \\x1b."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], RETURN.sub("", text)) if CONTROLS.search(text) else text


class CleanStream:
    """A standard stream, of which everything that is written through it is cleaned."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream

    def write(self, text: str) -> int:
        self.raw.write(cleaned(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextmanager
def clean_streams() -> Iterator[None]:
    """Has both standard streams cleaned for the block."""
    before = sys.stdout, sys.stderr
    sys.stdout = CleanStream(before[0])
    sys.stderr = CleanStream(before[1])
    try:
        yield
    finally:
        sys.stdout = before[0] if sys.stdout is not None else None
        sys.stderr = before[1]
