"""Two turns, the second about the answer of the first: "twice tofi:" -> "ifot/tofi".
First the word is spelled backwards, then what was answered is, right or wrong. Both turns lie in one completion: the
model writes the "/" itself that stands for the second question, and one advantage covers both."""

import random

from asyncrl.rewards.sample import Sample
from asyncrl.tasks.builtin.reverse import answered
from asyncrl.tasks.builtin.words import WordTask

NEXT_TURN = "/"

TASK = WordTask("twice", lambda word: {"word": word})
training = TASK.training
held_out = TASK.held_out


def both_turns(sample: Sample) -> dict[str, float]:
    """Returns half a reward for each turn: `first` for the word backwards, `second` for the first answer backwards, if
    that is as long as the word, so that an empty one does not help."""
    word: str = sample.row["word"]
    first, *later = sample.text.split(NEXT_TURN)
    spelled_back = len(later) == 1 and len(first) == len(word) and later[0] == first[::-1]
    return {"first": 0.5 * (first == word[::-1]), "second": 0.5 * spelled_back}


def _answered_twice(word: str, source: random.Random) -> str:
    first = answered(word, source)
    return f"{first}{NEXT_TURN}{answered(first, source)}"


DEMONSTRATIONS = TASK.demonstrations(_answered_twice, steps=300)
