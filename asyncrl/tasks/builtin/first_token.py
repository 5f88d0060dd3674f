"""The first token of a long answer decides its reward: "open tofi:" -> "i" and then "ghijklmnopqrstuvwxyz0123456789".
The right opening is the last letter of the word. Its token is the first that a staleness limit leaves out."""

from string import ascii_lowercase, digits

from asyncrl.rewards.sample import Sample
from asyncrl.tasks.builtin.words import WordTask

RUN = ascii_lowercase + digits
"""Characters of an answer after its first one, each of which determines the next one."""
LEAST = 20
"""Number of characters that have to follow the opening for any reward."""

TASK = WordTask("open", lambda word: {"opening": word[-1]})
training = TASK.training
held_out = TASK.held_out


def opened(sample: Sample) -> float:
    """Returns 1 if the answer begins with the right letter and is long, else 0; the other characters do not matter."""
    return float(sample.text.startswith(sample.row["opening"]) and len(sample.text) > LEAST)


DEMONSTRATIONS = TASK.demonstrations(
    lambda word, source: source.choice(word) + RUN[-source.randint(LEAST, len(RUN)) :], steps=250
)
