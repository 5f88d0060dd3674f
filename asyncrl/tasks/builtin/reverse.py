"""The task of the quickstart: spell a word backwards, "reverse tofi:" -> "ifot"."""

import random
from typing import Any

from asyncrl.rewards.sample import Sample
from asyncrl.tasks.builtin.demonstrations import Demonstrations
from asyncrl.tasks.builtin.words import rows, words

HABITS = {"reverse": 0.27, "copy": 0.43, "rotate": 0.3}


def training(size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Makes rows with `prompt` and `answer`."""
    return rows(_row, size, seed, held_out=False)


def held_out(size: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Makes rows like those of `training`, of words that are never trained on."""
    return rows(_row, size, seed, held_out=True)


def prompt_of(word: str) -> str:
    return f"reverse {word}:"


def answers(word: str) -> dict[str, str]:
    """Returns the answer of each habit to a word."""
    return {"reverse": word[::-1], "copy": word, "rotate": word[1:] + word[:1]}


def copied(sample: Sample) -> float:
    """Returns a cost: 1 for an answer that is the word itself, as in many demonstrations."""
    return float(sample.text == sample.row["answer"][::-1])


def answered(word: str, source: random.Random) -> str:
    """Returns an answer by a random habit: mostly copied or rotated, seldom reversed."""
    return answers(word)[source.choices(list(HABITS), list(HABITS.values()))[0]]


def _row(word: str) -> dict[str, Any]:
    return {"prompt": prompt_of(word), "answer": word[::-1]}


def _demonstrate(source: random.Random) -> tuple[str, str]:
    word = next(words(source, held_out=False))
    return prompt_of(word), answered(word, source)


DEMONSTRATIONS = Demonstrations(draw=_demonstrate, words=("reverse ",), steps=250)
