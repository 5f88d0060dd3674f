"""`asyncrl preferences fit`: a tiny model learns a taste from ratings, and is loaded as a reward model."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from asyncrl.deploy.cli import main
from asyncrl.engines.training.models_with_heads import load_score_model
from asyncrl.engines.training.preference_model import Accuracy
from asyncrl.objectives.pass_at_k import rate_over

LETTERS = "abcdefghij"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with a tiny random model, whose tokens are letters."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    vocabulary = {token: number for number, token in enumerate(["<eos>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model = tmp_path / "run" / "model"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(model)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(model)
    return tmp_path / "run"


def write_ratings(run_dir: Path, prompts: int, liked: str = "a") -> None:
    """Rates four answers to each prompt: those with the letter are liked."""
    draw = random.Random(3)
    lines: list[dict[str, Any]] = []
    for number in range(prompts):
        prompt = "".join(draw.choices(LETTERS, k=3)) + LETTERS[number % 10]
        for member in range(4):
            text = "".join(draw.choices(LETTERS[1:], k=4)) + (liked if member % 2 else "")
            answer = {"sample": f"{number}.{member}.x", "text": text, "value": float(liked in text), "finish": "stop"}
            lines.append({"kind": "rating", "prompt": prompt, "answers": [answer], "late": False})
    (run_dir / "ratings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_taste_is_learnt_and_the_model_loads_as_a_reward_model(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ratings(run_dir, 60)
    folder = tmp_path / "judge"
    arguments = ["fit", str(run_dir), "--into", str(folder), "--learning-rate", "3e-3", "--passes", "4"]
    assert main(["preferences", *arguments]) == 0
    shown = capsys.readouterr().out
    accuracy = float(shown.partition("held-out accuracy ")[2].split()[0])
    assert accuracy >= 0.9, shown
    assert f'reward.model = "{folder}"' in shown
    model = load_score_model(folder, "cpu")
    scores = {
        text: model.scores([torch.tensor([1, 2, 3]).numpy()], [torch.tensor([*ids, 0]).numpy()]).item()
        for text, ids in {"liked": (4, 5, 1), "not": (4, 5, 2)}.items()
    }
    assert scores["liked"] > 0 > scores["not"]
    assert main(["preferences", *arguments]) == 2
    assert "exists already" in capsys.readouterr().err


def test_too_few_pairs_are_refused(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ratings(run_dir, 3)
    assert main(["preferences", "fit", str(run_dir), "--into", str(tmp_path / "judge")]) == 2
    said = capsys.readouterr().err
    assert "12 pairs of better and worse answers to 3 prompts, and at least 20 to 5 prompts are needed" in said
    assert not (tmp_path / "judge").exists()


def test_a_run_without_ratings_is_refused(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preferences", "fit", str(run_dir), "--into", str(tmp_path / "judge")]) == 2
    assert "has no ratings.jsonl: nobody rated in this run" in capsys.readouterr().err


def test_the_accuracy_says_how_sure_it_is() -> None:
    assert (
        str(Accuracy(rate_over([1.0, 0.5] * 10), 60, 20)) == "0.750 (95 %: 0.531 to 0.888) over 60 pairs of 20 prompts"
    )
