"""Repeat the first letter of a word, "chant tofi:" -> "tttttt": tasks in which only the length of the answer counts. An
untrained model gets some 0.37 of either reward, for each has demonstrations of the lengths that it does not want."""

import random

from asyncrl.rewards.sample import Sample
from asyncrl.tasks.builtin.words import WordTask

LONGEST = 24
"""Letters beyond which an answer earns nothing more."""

TASK = WordTask("chant", lambda word: {"letter": word[0]})
training = TASK.training
held_out = TASK.held_out


def longer(sample: Sample) -> float:
    """Returns 1/24 for each letter, at most 1; 0 if the answer has another character."""
    return _letters(sample) / LONGEST


def shorter(sample: Sample) -> float:
    """Returns 1 for one letter, 1/24 less for each further letter down to 0; 0 if it has another character."""
    letters = _letters(sample)
    return max(0, LONGEST + 1 - letters) / LONGEST if letters else 0.0


def _letters(sample: Sample) -> int:
    """Returns the number of letters of the answer, at most LONGEST; 0 if it has another character."""
    return min(len(sample.text), LONGEST) if set(sample.text) == {sample.row["letter"]} else 0


def _mostly_short(word: str, source: random.Random) -> str:
    return word[0] * (1 + int(LONGEST * source.random() ** 2))


def _mostly_long(word: str, source: random.Random) -> str:
    return word[0] * (LONGEST - int(LONGEST * source.random() ** 2))


FOR_LONGER = TASK.demonstrations(_mostly_short, steps=200)
FOR_SHORTER = TASK.demonstrations(_mostly_long, steps=200)
