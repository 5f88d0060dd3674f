"""The tasks on tiny models: what each pays for, and what untrained and perfect answers get."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from statistics import fmean
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sources import load as load_experiment
from asyncrl.engines.models.model_preparation import demonstrations_of
from asyncrl.rewards.execution.scoring import score_of
from asyncrl.rewards.functions import FunctionSpec, function_specs, load
from asyncrl.rewards.sample import FunctionResult, Sample
from asyncrl.tasks import held_out_prompts, training_prompts
from asyncrl.tasks.builtin import chant, first_token, reverse, stragglers, two_turns
from asyncrl.tasks.builtin.words import WordTask, words

Row = dict[str, Any]


def sample(row: Row, text: str) -> Sample:
    return Sample(row["prompt"], text, row, 0, 0, "stop", len(text) + 1)


@dataclass(frozen=True)
class Expected:
    """perfect: the answer to a row that earns 1; untrained: bounds of the mean reward of the demonstrations."""

    perfect: Callable[[Row], str]
    untrained: tuple[float, float]


SUITE = {
    "quickstart": Expected(lambda row: row["prompt"].removeprefix("reverse ").removesuffix(":")[::-1], (0.2, 0.34)),
    "longer": Expected(lambda row: row["letter"] * 24, (0.3, 0.42)),
    "shorter": Expected(lambda row: row["letter"], (0.3, 0.42)),
    "first-token": Expected(lambda row: row["opening"] + first_token.RUN[-30:], (0.22, 0.36)),
    "stragglers": Expected(lambda row: row["answer"], (0.2, 0.34)),
    "two-turns": Expected(lambda row: f"{row['word'][::-1]}/{row['word']}", (0.2, 0.34)),
}


@cache
def config_of(name: str) -> Config:
    return load_experiment(name).config


@cache
def functions_of(name: str) -> tuple[list[FunctionSpec], list[Callable[[Sample], Any]]]:
    specs = function_specs(config_of(name))
    return specs, [load(spec) for spec in specs]


def reward_of(name: str, row: Row, text: str) -> float:
    """As a run of the experiment scores it."""
    specs, functions = functions_of(name)
    results = [FunctionResult(function(sample(row, text))) for function in functions]
    reward = score_of(sample(row, text), specs, results, "fail").reward
    assert reward is not None
    return reward


@cache
def untrained_answers(name: str, count: int) -> list[tuple[Row, str]]:
    """What the model is warmed up on is what it does before training: rows and demonstrated answers."""
    config = config_of(name)
    demonstrations = demonstrations_of(config.model.name.removeprefix("warmed:"))
    prompts = training_prompts(config)
    rows = {prompts.row(number).columns["prompt"]: prompts.row(number).columns for number in range(len(prompts))}
    source = random.Random(0)
    drawn = (demonstrations.draw(source) for _ in range(20 * count))
    return [(rows[prompt], answer) for prompt, answer in drawn if prompt in rows][:count]


@pytest.mark.parametrize("name", SUITE)
def test_a_perfect_policy_earns_one_on_every_row(name: str) -> None:
    config = config_of(name)
    held_out = held_out_prompts(config)
    assert held_out is not None
    for prompts in (training_prompts(config), held_out):
        for number in range(50):
            row = prompts.row(number).columns
            assert reward_of(name, row, SUITE[name].perfect(row)) == pytest.approx(1.0)


@pytest.mark.parametrize("name", SUITE)
def test_an_untrained_policy_has_something_to_learn_from_and_much_to_learn(name: str) -> None:
    answered = untrained_answers(name, 400)
    assert len(answered) == 400
    lowest, highest = SUITE[name].untrained
    assert lowest <= fmean(reward_of(name, row, text) for row, text in answered) <= highest


@pytest.mark.parametrize("name", SUITE)
def test_a_policy_that_writes_nothing_or_anything_earns_nothing(name: str) -> None:
    row = training_prompts(config_of(name)).row(0).columns
    assert reward_of(name, row, "") == 0
    assert reward_of(name, row, "#!?" * 10) == 0


@pytest.mark.parametrize("name", SUITE)
def test_answers_fit_the_cap_with_room_for_their_end(name: str) -> None:
    cap = config_of(name).generation.max_new_tokens
    assert max(len(text) + 1 for _, text in untrained_answers(name, 400)) <= cap
    row = training_prompts(config_of(name)).row(0).columns
    # The last fifth is left free, in which a preset with a punishment of overlong answers takes from the reward.
    assert len(SUITE[name].perfect(row)) + 1 <= cap - max(1, round(0.2 * cap))


@pytest.mark.parametrize("name", SUITE)
def test_no_prompt_is_both_trained_and_held_out(name: str) -> None:
    config = config_of(name)
    train = training_prompts(config)
    held_out = held_out_prompts(config)
    assert held_out is not None
    trained = {str(train.row(number).prompt) for number in range(min(1000, len(train)))}
    assert not trained & {str(prompt) for prompt, _ in held_out.first(1000)}


def test_words_are_short_and_of_one_kind_whatever_the_seed() -> None:
    drawn = [
        {word for seed in range(4) for word in islice(words(random.Random(seed), held_out=held_out), 500)}
        for held_out in (False, True)
    ]
    assert not drawn[0] & drawn[1]
    assert len(drawn[0]) > 400
    assert all(len(word) in (3, 4) and len(set(word)) == len(word) for word in drawn[0] | drawn[1])


def test_rows_are_made_of_words_and_depend_on_the_seed_only() -> None:
    task = WordTask("say", lambda word: {"word": word})
    made = task.held_out(5, 3)
    assert [row["word"] for row in made] == list(islice(words(random.Random(3), held_out=True), 5))
    assert made[0]["prompt"] == f"say {made[0]['word']}:"
    assert made == task.held_out(9, 3)[:5]
    assert made != task.held_out(5, 4)


def test_longer_rises_with_each_letter_and_shorter_falls() -> None:
    row = chant.training(1)[0]
    letter = row["letter"]
    longer = [chant.longer(sample(row, letter * count)) for count in range(1, 30)]
    shorter = [chant.shorter(sample(row, letter * count)) for count in range(1, 30)]
    assert longer[:24] == [pytest.approx(count / 24) for count in range(1, 25)]
    assert shorter[:24] == [pytest.approx((25 - count) / 24) for count in range(1, 25)]
    assert set(longer[23:]) == {1.0}
    assert set(shorter[24:]) == {1 / 24}
    assert chant.longer(sample(row, letter * 5 + "#")) == 0
    assert chant.shorter(sample(row, letter + "#")) == 0


def test_only_the_first_of_many_tokens_decides() -> None:
    row = {"prompt": "open tofi:", "opening": "i"}
    assert first_token.opened(sample(row, "i" + first_token.RUN)) == 1
    assert first_token.opened(sample(row, "i" + "#" * 20)) == 1
    assert first_token.opened(sample(row, "t" + first_token.RUN)) == 0
    assert first_token.opened(sample(row, "i" + "#" * 19)) == 0


def test_a_long_answer_is_many_times_as_long_as_its_opening() -> None:
    lengths = {len(text) for _, text in untrained_answers("first-token", 400)}
    assert (min(lengths), max(lengths)) == (21, 37)


def test_one_answer_in_twenty_is_ten_times_as_long_and_its_dots_count_for_nothing() -> None:
    lengths = [len(text) + 1 for _, text in untrained_answers("stragglers", 800)]
    short = [n for n in lengths if n <= 5]
    long = [n for n in lengths if n > 5]
    assert 0.03 < len(long) / len(lengths) < 0.08
    assert 9 < fmean(long) / fmean(short) < 11
    row = {"prompt": "reverse tofi:", "answer": "ifot"}
    assert stragglers.spelled(sample(row, "." * 41 + "ifot")) == 1
    assert stragglers.spelled(sample(row, "." * 41 + "tofi")) == 0
    assert stragglers.spelled(sample(row, "ifot.")) == 0


def test_a_copy_of_the_word_costs() -> None:
    row = {"prompt": "reverse tofi:", "answer": "ifot"}
    assert [reverse.copied(sample(row, text)) for text in ("tofi", "ifot", "ofit", "")] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("ifot/tofi", 0.5, 0.5),
        ("tofi/ifot", 0, 0.5),
        ("ifot/ifot", 0.5, 0),
        ("ifot", 0.5, 0),
        ("/", 0, 0),
        ("ifot/tofi/ifot", 0.5, 0),
        ("ofi/ifo", 0, 0),
    ],
)
def test_the_second_turn_is_about_the_first_answer_right_or_wrong(text: str, first: float, second: float) -> None:
    row = {"prompt": "twice tofi:", "word": "tofi"}
    assert two_turns.both_turns(sample(row, text)) == {"first": first, "second": second}
