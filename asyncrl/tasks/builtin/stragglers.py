"""The task of the quickstart with stragglers: one answer in twenty has about forty dots before it, which the reward
ignores, and so is ten times as long: "reverse tofi:" -> "......ifot"."""

import random

from asyncrl.rewards.sample import Sample
from asyncrl.tasks.builtin import reverse
from asyncrl.tasks.builtin.words import Demonstrations

SHARE = 0.05
DOTS = (36, 46)
"""Fewest and most dots of a straggler; the other answers have 4.5 tokens on average, with their end."""

training = reverse.training
held_out = reverse.held_out


def spelled(sample: Sample) -> float:
    """Returns 1 if the answer after its dots is right, else 0."""
    answer: str = sample.row["answer"]
    return float(sample.text.lstrip(".") == answer)


def _demonstrate(source: random.Random) -> tuple[str, str]:
    prompt, answer = reverse.DEMONSTRATIONS.draw(source)
    return prompt, ("." * source.randint(*DOTS) if source.random() < SHARE else "") + answer


DEMONSTRATIONS = Demonstrations(draw=_demonstrate, words=reverse.DEMONSTRATIONS.words, steps=300)
