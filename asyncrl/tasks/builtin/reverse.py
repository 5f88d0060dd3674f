"""The task of the quickstart: spell a word backwards, "reverse tofi:" -> "ifot"."""

import random

from asyncrl.rewards.sample import Sample
from asyncrl.tasks.builtin.words import WordTask

HABITS = {"reverse": 0.27, "copy": 0.43, "rotate": 0.3}

TASK = WordTask("reverse", lambda word: {"answer": word[::-1]})
training = TASK.training
held_out = TASK.held_out


def copied(sample: Sample) -> float:
    """Returns a cost: 1 for an answer that is the word itself, as in many demonstrations."""
    return float(sample.text == sample.row["answer"][::-1])


def answered(word: str, source: random.Random) -> str:
    """Returns an answer by a random habit: mostly copied or rotated, seldom reversed."""
    answers = {"reverse": word[::-1], "copy": word, "rotate": word[1:] + word[:1]}
    return answers[source.choices(list(HABITS), list(HABITS.values()))[0]]


DEMONSTRATIONS = TASK.demonstrations(answered, steps=250)
