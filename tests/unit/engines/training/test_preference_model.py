"""The fit of a reward model: what counts how much, what a tie says, and which tokens are scored."""

from pathlib import Path

import pytest
import torch

from asyncrl.engines.training import preference_model
from asyncrl.engines.training.preference_model import PreferenceModel
from asyncrl.objectives.losses import bradley_terry_loss
from asyncrl.rewards.feedback.pairs import EQUAL, ComparedPrompt, Preference, RatedAnswer
from tests.unit.letter_model import LETTERS, write_letter_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("letters")
    write_letter_model(path)
    return path


@pytest.fixture
def model(folder: Path) -> PreferenceModel:
    """Returns a model whose new head gives 0 for every answer."""
    return PreferenceModel(folder, 3e-3, seed=1)


def with_a_head(model: PreferenceModel) -> PreferenceModel:
    """Gives the model a random head."""
    torch.manual_seed(2)
    (head,) = (each for name, each in model._model.whole.named_parameters() if name.startswith("score"))
    torch.nn.init.normal_(head, std=1.0)
    return model


def prompt(*pairs: tuple[str, str, float], text: str = "ab") -> ComparedPrompt:
    found = ComparedPrompt(text)
    for first, second, wins in pairs:
        better, other = (found.number(answer(text, each)) for each in (first, second))
        found.pairs.append(Preference(better, other, wins))
    return found


def answer(asked: str, text: str) -> RatedAnswer:
    return RatedAnswer(text, "", "stop", tuple(1 + LETTERS.index(letter) for letter in asked + text))


ONE_PAIR = prompt(("c", "d", 1.0))
SIX_PAIRS = prompt(*((first, second, 1.0) for first, second in ("ce", "cf", "cg", "ef", "eg", "fg")), text="ba")


def test_each_prompt_has_the_same_share_however_many_pairs_it_has(model: PreferenceModel) -> None:
    better, other, wins, shares = with_a_head(model)._scored([ONE_PAIR, SIX_PAIRS])
    assert shares.tolist() == pytest.approx([1 / 2, *[1 / 12] * 6])
    expected = (shares * bradley_terry_loss(better, other, wins)).sum().item()
    assert model._step([ONE_PAIR, SIX_PAIRS]) == pytest.approx(expected)
    alone = [model._scored([each])[:2] for each in (ONE_PAIR, SIX_PAIRS)]
    together = model._scored([ONE_PAIR, SIX_PAIRS])[:2]
    for number in range(2):
        assert torch.allclose(torch.cat([pair[number] for pair in alone]), together[number], atol=1e-5)


def test_a_tie_draws_two_scores_together(model: PreferenceModel) -> None:
    tie = prompt(("c", "d", EQUAL))
    with_a_head(model)
    first, second, _, _ = model._scored([tie])
    before = (first - second).abs().item()
    assert before > 0.01
    model.fit([tie], 30, lambda line: None)
    first, second, _, _ = model._scored([tie])
    assert (first - second).abs().item() < before / 3


def level_of(model: PreferenceModel) -> float:
    first, second, _, _ = model._scored([prompt(("c", "d", EQUAL))])
    return float(((first + second) / 2).abs().item())


def test_the_level_of_scores_is_held_about_zero(model: PreferenceModel) -> None:
    """A tie says nothing about the level of its scores, so that only the centering changes it."""
    tie = prompt(("c", "d", EQUAL))
    before = level_of(with_a_head(model))
    assert before > 0.05
    model.fit([tie], 100, lambda line: None)
    assert level_of(model) < before / 4


def test_equal_scores_are_right_by_half_and_ties_are_left_out(model: PreferenceModel) -> None:
    found = model.accuracy([prompt(("c", "d", 1.0), ("e", "f", EQUAL)), prompt(("g", "h", EQUAL)), SIX_PAIRS])
    assert (found.rate.mean, found.pairs, found.prompts) == (0.5, 7, 2)


def test_a_long_conversation_loses_its_beginning(model: PreferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference_model, "MOST_TOKENS", 3)
    with_a_head(model)
    long, tail, other = ([*model._scored([prompt(("c", "d", 1.0), text=text)])[0]] for text in ("efgab", "ab", "ba"))
    assert long == tail != other
