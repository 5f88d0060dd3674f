"""The pretraining loss beside the policy's: its formula, its gradient over micro-batches and ranks, its texts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import Config
from asyncrl.engines.training.policy_trainer import PolicyTrainer, texts_of
from asyncrl.errors import TaskError
from asyncrl.tasks.prompt_rows import drawn_row
from tests.unit.engines.training.tiny_training import INCARNATION, VERSION, make_config, make_rows, side_by_side, step

LENGTHS = (2, 9, 4, 14, 3, 6, 11)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Ragged texts, and prompts with answers."""
    draw = np.random.default_rng(2)
    path = tmp_path / "pretrain.jsonl"

    def words(count: int) -> str:
        return " ".join(f"w{number}" for number in draw.integers(1, 50, count))

    rows = [{"text": words(length)} for length in LENGTHS]
    rows += [{"prompt": words(length), "answer": words(15 - length)} for length in LENGTHS]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def learning(coefficient: float = 0.5, per_step: int = 7, **training: Any) -> Config:
    task = {"prompts": "none", "pretrain": "p.jsonl", "pretrain_per_step": per_step, "max_prompt_tokens": 30}
    algorithm = {"pretrain_coefficient": coefficient}
    training = {"learning_rate": 0.0, "max_grad_norm": 1e9, **training}
    return make_config(task=task, algorithm=algorithm, training=training, generation={"max_new_tokens": 10})


def gradient(engine: PolicyTrainer) -> torch.Tensor:
    """Of the one step that was taken, over all ranks, all parameters in one vector."""
    state = engine.optimizer.parts[0].state
    parameters = engine.optimizer.parameters
    return torch.cat([state[parameter]["exp_avg"].flatten() for parameter in parameters]) / 0.1


def logprobs_by_transformers(folder: Path, path: Path) -> tuple[list[np.ndarray], list[int]]:
    """Float64 [tokens - 1] of each text with its end, and how many tokens are given; none longer than 40."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval().double()
    found = []
    given = []
    for row in map(json.loads, path.read_text().splitlines()):
        words = f"{row['prompt']} {row['answer']}" if "prompt" in row else row["text"]
        ids = torch.tensor([*(int(word[1:]) for word in words.split()), 0])[:40]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1, :50]
        found.append(logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1).numpy())
        given.append(len(row["prompt"].split()) if "prompt" in row else 1)
    return found, given


def of_step(config: Config, update: int = 0) -> list[int]:
    """Numbers of the texts of the step from VERSION."""
    count = config.task.pretrain_per_step
    updates = config.training.updates
    places = range(update * count // updates, (update + 1) * count // updates)
    return [drawn_row(config.seed, VERSION * count + place, 2 * len(LENGTHS)) for place in places]


def test_the_loss_is_the_mean_cross_entropy_of_what_is_learnt(tiny: Path, texts: Path) -> None:
    """-1/N sum of log pi(x_t | x_<t): texts after their first token, answers after their prompts, ends included."""
    for config in (learning(), learning(updates=3)):
        logprobs, given = logprobs_by_transformers(tiny, texts)
        losses = []
        for update in range(config.training.updates):
            learnt = np.concatenate([logprobs[row][given[row] - 1 :] for row in of_step(config, update)])
            losses.append(-learnt.mean())
        engine = PolicyTrainer(config, tiny, texts=texts)
        metrics = step(engine, make_rows()).metrics
        assert metrics["policy/pretrain_loss"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_its_gradient_is_added_with_the_coefficient(tiny: Path, texts: Path) -> None:
    """Against autograd of transformers' own model, in float64."""
    config = learning(coefficient=0.7)
    rows = make_rows()
    beside = PolicyTrainer(config, tiny, texts=texts)
    alone = PolicyTrainer(config, tiny)
    for engine in (beside, alone):
        step(engine, rows)
    model = AutoModelForCausalLM.from_pretrained(tiny).eval().double()
    total = torch.zeros(()).double()
    tokens = 0
    for row in of_step(config):
        text = engine_texts(beside)[row]
        ids = torch.from_numpy(np.concatenate([text.prompt_ids, text.response_ids]))
        logprobs = model(input_ids=ids[None]).logits[0, :-1, :50].log_softmax(-1).gather(-1, ids[1:, None])
        total = total - logprobs[len(text.prompt_ids) - 1 :].sum()
        tokens = tokens + len(text.response_ids)
    (0.7 * total / tokens).backward()
    theirs = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert theirs.abs().max() > 1e-2
    torch.testing.assert_close((gradient(beside) - gradient(alone)).double(), theirs, atol=1e-6, rtol=1e-4)


def engine_texts(engine: PolicyTrainer) -> Any:
    assert engine.texts is not None
    return engine.texts


@pytest.mark.trap("micro_batches")
def test_gradients_are_the_same_for_1_2_and_7_micro_batches_of_texts(tiny: Path, texts: Path) -> None:
    """Seven rows of 16 tokens; one more pass is that of the sample, one that of the optimizer."""
    found = {}
    rows = make_rows(1)
    texts.write_text("".join(texts.read_text().splitlines(keepends=True)[len(LENGTHS) :]))
    for budget in (7 * 16, 4 * 16, 16):
        engine = PolicyTrainer(learning(micro_batch_tokens=budget), tiny, texts=texts)
        run = engine.begin(rows, INCARNATION, VERSION)
        passes = sum(1 for _ in iter(run.advance, False)) - 2
        found[passes] = gradient(engine)
    assert sorted(found) == [1, 2, 7]
    for other in list(found.values())[1:]:
        torch.testing.assert_close(other, found[1], atol=1e-6, rtol=1e-4)


@pytest.mark.trap("micro_batches")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_learn_what_one_does(size: int, tiny: Path, texts: Path, thread_ranks: Callable) -> None:
    rows = make_rows(6)
    config = learning()
    alone = PolicyTrainer(config, tiny, texts=texts)
    expected = step(alone, rows).metrics
    engines = [PolicyTrainer(config, tiny, rank, texts) for rank in thread_ranks(size)]
    shares = [rows[:4], rows[4:], []][:size]
    outcomes = side_by_side([lambda e=e, s=s: step(e, s) for e, s in zip(engines, shares, strict=True)])
    for engine, outcome in zip(engines, outcomes, strict=True):
        assert outcome.metrics == pytest.approx(expected, rel=1e-6, abs=1e-6)
        torch.testing.assert_close(gradient(engine), gradient(alone), atol=1e-6, rtol=1e-4)


@pytest.mark.trap("not_finite")
def test_a_text_whose_loss_is_not_finite_changes_nothing(tiny: Path, texts: Path) -> None:
    engine = PolicyTrainer(learning(coefficient=1e38, learning_rate=1e-3), tiny, texts=texts)
    before = {name: tensor.clone() for name, tensor in engine.named_tensors().items()}
    assert step(engine, make_rows()).skipped == "not finite"
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_tensors().items())


def test_every_text_comes_once_before_one_comes_again(tiny: Path, texts: Path) -> None:
    config = learning(per_step=4, updates=2)
    given = engine_texts(PolicyTrainer(config, tiny, texts=texts))
    drawn = [id(text) for version in range(7) for update in (0, 1) for text in texts_of(given, config, version, update)]
    assert len(set(drawn[:14])) == len(set(drawn[14:])) == 14


@pytest.mark.parametrize(("positions", "longest"), [(128, 40), (25, 25)])
def test_no_text_goes_beyond_the_positions_of_the_model(
    positions: int, longest: int, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "w1 " * 100}) + "\n")
    model = make_model(max_position_embeddings=positions)
    (text,) = engine_texts(PolicyTrainer(learning(), model, texts=path))
    assert len(text.prompt_ids) + len(text.response_ids) == longest


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": ""}, "row 1: 1 of its 1 tokens .* none is learnt"),
        ({"prompt": "w1 " * 50, "answer": "w2"}, r"row 1: 50 of its 52 tokens \(at most 40\) are given"),
        ({"prompt": [{"role": "user", "content": "w1"}], "answer": "w2"}, "no chat template"),
    ],
)
def test_a_text_of_which_nothing_can_be_learnt_is_refused(
    row: dict[str, Any], says: str, tiny: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(TaskError, match=says):
        PolicyTrainer(learning(), tiny, texts=path)
