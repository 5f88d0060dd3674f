"""`asyncrl preferences fit`: a tiny model learns a taste from ratings, and is loaded as a reward model."""

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.deploy.cli import main
from asyncrl.engines.training.models_with_heads import load_score_model
from asyncrl.engines.training.preference_model import Accuracy
from asyncrl.objectives.pass_at_k import rate_over
from tests import golden
from tests.unit.letter_model import LETTERS, write_letter_model

ROLES = ("assistant", "user", "assistant")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with a tiny random model, whose tokens are letters."""
    write_letter_model(tmp_path / "run" / "model")
    return tmp_path / "run"


def write_ratings(run_dir: Path, prompts: int, liked: str = "a", *, turns: bool = False) -> None:
    """Rates four answers to each prompt: those with the letter are liked. turns: they are first turns of episodes that
    all end alike."""
    draw = random.Random(3)
    lines: list[dict[str, Any]] = []
    for number in range(prompts):
        prompt = "".join(draw.choices(LETTERS, k=3)) + LETTERS[number % 10]
        for member in range(4):
            text = "".join(draw.choices(LETTERS[1:], k=4)) + (liked if member % 2 else "")
            said = text + "jb" if turns else text
            answer = {"sample": f"{number}.{member}.x", "text": "b" if turns else text, "finish": "stop"}
            answer |= {
                "value": float(liked in text),
                "tokens": [*(1 + LETTERS.index(each) for each in prompt + said), 0],
            }
            if turns:
                answer["turns"] = [
                    {"role": role, "content": each} for role, each in zip(ROLES, (text, "j", "b"), strict=True)
                ]
            lines.append({"kind": "rating", "prompt": prompt, "answers": [answer], "late": False})
    (run_dir / "ratings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("turns", [False, True])
def test_a_taste_is_learnt_and_the_model_loads_as_a_reward_model(
    turns: bool, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ratings(run_dir, 60, turns=turns)
    folder = tmp_path / "judge"
    arguments = ["fit", str(run_dir), "--into", str(folder), "--learning-rate", "3e-3", "--passes", "4"]
    assert main(["preferences", *arguments]) == 0
    shown = capsys.readouterr().out
    accuracy = float(shown.partition("held-out accuracy ")[2].split()[0])
    assert accuracy >= 0.9, shown
    assert f'reward.model = "{folder}"' in shown
    model = load_score_model(folder, "cpu")
    after = (10, 2) if turns else ()
    scores = {
        text: model.scores([torch.tensor([1, 2, 3, *ids, 0]).numpy()]).item()
        for text, ids in {"liked": (4, 5, 1, *after), "not": (4, 5, 2, *after)}.items()
    }
    assert scores["liked"] > 0 > scores["not"]
    assert main(["preferences", *arguments]) == 2
    assert "exists already" in capsys.readouterr().err


def other_tokenizer(run_dir: Path) -> str:
    """Makes a model with two letters of its tokenizer exchanged; returns the flag that names it."""
    write_ratings(run_dir, 60)
    other = shutil.copytree(run_dir / "model", run_dir / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    return f"--model={other}"


def no_model(run_dir: Path) -> str:
    write_ratings(run_dir, 60)
    return f"--model={run_dir}"


def rated(*lines: object) -> Callable[[Path], None]:
    """Returns what writes these ratings."""
    return lambda run_dir: (run_dir / "ratings.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


OLD = {"kind": "rating", "prompt": "p", "answers": [{"sample": "0.0.x", "text": "a", "value": 1.0}]}


@pytest.mark.parametrize(
    "prepare",
    [
        other_tokenizer,
        no_model,
        partial(write_ratings, prompts=3),
        rated(OLD),
        rated({"kind": "rating"}),
        lambda run: None,
    ],
    ids=["another tokenizer", "no model", "too few pairs", "of an earlier version", "damaged", "none"],
)
def test_what_cannot_be_learnt_from_is_refused(
    prepare: Callable[[Path], str | None], run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag] if (flag := prepare(run_dir)) is not None and isinstance(flag, str) else []
    assert main(["preferences", "fit", str(run_dir), "--into", str(tmp_path / "judge"), *flags]) == 2
    shown = capsys.readouterr()
    golden.says(shown.out + shown.err)
    assert not (tmp_path / "judge").exists()


def test_a_rate_that_breaks_a_model_is_warned_of(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fit", str(run_dir), "--into", str(tmp_path / "judge"), "--learning-rate"]
    for rate, is_warned in (("1", True), ("1e-3", False)):
        assert main(["preferences", *arguments, rate]) == 2
        shown = capsys.readouterr().out
        assert ("warning: --learning-rate: AdamW moves every weight by about 1 in an update" in shown) == is_warned


def test_the_accuracy_says_how_sure_it_is() -> None:
    assert (
        str(Accuracy(rate_over([1.0, 0.5] * 10), 60, 20)) == "0.750 (95 %: 0.531 to 0.888) over 60 pairs of 20 prompts"
    )
