import random
from collections import Counter

from asyncrl.tasks.builtin.reverse import DEMONSTRATIONS, HABITS, held_out, training


def test_training_and_held_out_words_are_disjoint_for_all_seeds() -> None:
    train = {row["prompt"] for seed in range(4) for row in training(500, seed)}
    held = {row["prompt"] for seed in range(4) for row in held_out(500, seed)}
    assert not train & held


def test_the_answer_is_the_word_backwards() -> None:
    for row in training(50):
        word = row["prompt"].removeprefix("reverse ").removesuffix(":")
        assert 3 <= len(word) <= 5
        assert len(set(word)) == len(word)
        assert row["answer"] == "".join(reversed(word))


def test_rows_depend_on_the_seed_only() -> None:
    assert training(20, 3) == training(20, 3) != training(20, 4)
    assert training(20, 3)[:10] == training(10, 3)


def test_the_right_habit_is_the_rarest() -> None:
    source = random.Random(0)
    right = Counter[bool]()
    for _ in range(2000):
        prompt, answer = DEMONSTRATIONS.draw(source)
        right[answer == prompt.removeprefix("reverse ").removesuffix(":")[::-1]] += 1
    assert 0.2 < right[True] / 2000 < 0.3
    assert HABITS["reverse"] == min(HABITS.values())
