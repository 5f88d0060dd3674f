"""Demonstrations: the texts that a tiny model made on the spot is trained on before a run."""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Worked examples of a task, good and bad habits mixed.

    draw: random source -> (prompt, completion), printable ASCII. words: pieces of text that are one token; every
    other character is a token of its own. steps: optimizer steps of the warm-up, 64 demonstrations each.
    """

    draw: Callable[[random.Random], tuple[str, str]]
    words: tuple[str, ...] = ()
    steps: int = 250
