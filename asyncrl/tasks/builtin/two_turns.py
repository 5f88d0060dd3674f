"""Two turns, the second about the answer of the first: "twice tofi:" -> "ifot/tofi".

First the word is spelled backwards, then what was answered is, right or wrong. Both turns lie in one completion: the
model writes the "/" itself that stands for the second question, and one advantage covers both. Turns in which somebody
else speaks in between need generation to begin a second time after the first answer, which no page does yet.
"""

import random
from typing import Any

from asyncrl.rewards.sample import Sample
from asyncrl.tasks.demonstrations import Demonstrations
from asyncrl.tasks.reverse import answered
from asyncrl.tasks.words import rows, words

NEXT_TURN = "/"


def training(size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with `prompt` and `word`."""
    return rows(_row, size, seed, held_out=False)


def held_out(size: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Rows like those of `training`, of words that are never trained on."""
    return rows(_row, size, seed, held_out=True)


def both_turns(sample: Sample) -> dict[str, float]:
    """Half a reward a turn: `first` for the word backwards, `second` for the first answer backwards.

    The second turn counts only after a first answer as long as the word, so that an empty one does not help.
    """
    word: str = sample.row["word"]
    first, *later = sample.text.split(NEXT_TURN)
    spelled_back = len(later) == 1 and len(first) == len(word) and later[0] == first[::-1]
    return {"first": 0.5 * (first == word[::-1]), "second": 0.5 * spelled_back}


def _row(word: str) -> dict[str, Any]:
    return {"prompt": f"twice {word}:", "word": word}


def _demonstrate(source: random.Random) -> tuple[str, str]:
    word = next(words(source, held_out=False))
    first = answered(word, source)
    return f"twice {word}:", f"{first}{NEXT_TURN}{answered(first, source)}"


DEMONSTRATIONS = Demonstrations(draw=_demonstrate, words=("twice ",), steps=300)
