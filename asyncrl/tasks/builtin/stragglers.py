"""Words spelled backwards, as in the quickstart; one answer in twenty is ten times as long.

Such a straggler writes some forty dots before its answer, which count for nothing: "reverse tofi:" -> "......ifot".
One in twenty they are at first: a policy that is right less often after dots writes them ever more seldom.
"""

import random

from asyncrl.rewards.sample import Sample
from asyncrl.tasks import reverse
from asyncrl.tasks.demonstrations import Demonstrations

SHARE = 0.05
DOTS = (36, 46)
"""Fewest and most that a straggler begins with; the other answers have 4.5 tokens on average, their end included."""

training, held_out = reverse.training, reverse.held_out


def spelled(sample: Sample) -> float:
    """1 when the answer after its dots is right, else 0."""
    answer: str = sample.row["answer"]
    return float(sample.text.lstrip(".") == answer)


def _demonstrate(source: random.Random) -> tuple[str, str]:
    prompt, answer = reverse.DEMONSTRATIONS.draw(source)
    return prompt, ("." * source.randint(*DOTS) if source.random() < SHARE else "") + answer


DEMONSTRATIONS = Demonstrations(draw=_demonstrate, words=reverse.DEMONSTRATIONS.words, steps=300)
