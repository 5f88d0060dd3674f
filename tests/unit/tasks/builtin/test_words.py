import random
from itertools import islice

from asyncrl.tasks.builtin.words import WordTask, words


def test_words_are_short_and_have_no_letter_twice() -> None:
    found = list(islice(words(random.Random(0), held_out=False), 500))
    assert {len(word) for word in found} == {3, 4}
    assert all(len(set(word)) == len(word) for word in found)
    assert len(set(found)) > 400


def test_no_word_is_of_both_kinds_whatever_the_seed() -> None:
    train = {word for seed in range(4) for word in islice(words(random.Random(seed), held_out=False), 500)}
    held = {word for seed in range(4) for word in islice(words(random.Random(seed), held_out=True), 500)}
    assert not train & held


def test_rows_are_made_of_words_and_depend_on_the_seed_only() -> None:
    task = WordTask("say", lambda word: {"word": word})
    made = task.held_out(5, 3)
    assert [row["word"] for row in made] == list(islice(words(random.Random(3), held_out=True), 5))
    assert made[0]["prompt"] == f"say {made[0]['word']}:"
    assert made == task.held_out(5, 3)
    assert made != task.held_out(5, 4)
