"""What the trainer computes with: no dropout, float32 masters, and no more of the head than the tokenizer knows."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.micro_batches import lay_out_rows
from asyncrl.engines.training.models_with_heads import (
    frozen_logprobs,
    load_causal_model,
    load_score_model,
    load_value_model,
)
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import StepOutcome
from asyncrl.errors import ConfigError
from tests.unit.engines.training.tiny_training import VERSION, changed, make_config, make_rows, step, weights


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.trap("dropout")
def test_dropout_is_off_in_training(checkpointing: bool, make_model: Callable[..., Path]) -> None:
    config = make_config(training={"gradient_checkpointing": checkpointing, "learning_rate": 0.0})
    engine = PolicyTrainer(config, make_model("llama", attention_dropout=0.5))
    rows = make_rows(6)
    assert engine.model.whole.training
    first, second = (step(engine, rows) for _ in range(2))
    assert first.metrics == second.metrics


@pytest.mark.trap("dropout")
def test_dropout_is_off_in_reference_and_critic(make_model: Callable[..., Path]) -> None:
    folder = make_model("llama", attention_dropout=0.5)
    rows = make_rows(6)
    reference = load_causal_model(folder, "cpu")
    reference.whole.train()
    first, second = (frozen_logprobs(reference, rows, 1024) for _ in range(2))
    assert all(np.array_equal(*pair) for pair in zip(first, second, strict=True))
    critic = load_value_model(folder, "cpu")
    critic.whole.train()
    with torch.no_grad():
        critic.head.weight.normal_()
        values = [critic.values(lay_out_rows(rows, critic.device)) for _ in range(2)]
    assert values[0].abs().max() > 0.1
    assert torch.equal(*values)


def test_a_new_head_is_loaded_without_a_word(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_value_model(tiny, "cpu")
    assert capfd.readouterr() == ("", "")


def test_values_are_not_rounded_to_bfloat16(tiny: Path) -> None:
    """Near scores would be equal, and their advantages 0."""
    critic = load_value_model(tiny, "cpu", "bfloat16")
    with torch.no_grad():
        critic.head.weight.normal_()
        values = critic.values(lay_out_rows(make_rows(6), critic.device))
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


@pytest.mark.trap("engines_disagree")
def test_a_float32_head_rounds_no_logit_and_passes_its_gradient(tiny: Path) -> None:
    model = load_causal_model(tiny, "cpu", "bfloat16", float32_head=True)
    states = torch.randn(7, 32).bfloat16().requires_grad_()
    logits = model.logits(states)
    expected = states.detach().double() @ model.head.weight.double().T
    torch.testing.assert_close(logits.double(), expected[:, : model.vocabulary], atol=1e-5, rtol=1e-5)
    logits.square().sum().backward()
    assert states.grad is not None
    assert model.head.weight.grad.dtype == torch.float32
    rough = load_causal_model(tiny, "cpu", "bfloat16").logits(states)
    assert torch.equal(rough, rough.bfloat16().float()), "without it, logits are rounded"


@pytest.mark.parametrize("exact", [False, True])
def test_the_trainer_takes_its_head_from_the_config(tiny: Path, exact: bool) -> None:
    config = make_config(model={"name": "tiny", "float32_head": exact}, training={"precision": "bfloat16"})
    assert PolicyTrainer(config, tiny).model.float32_head is exact


def test_bfloat16_autocast_trains_close_to_float32(train: Callable[..., StepOutcome]) -> None:
    exact, rough = (train(make_rows(10), training={"precision": each}).metrics for each in ("float32", "bfloat16"))
    assert rough["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)
    assert rough["policy/entropy"] != exact["policy/entropy"]


@pytest.mark.trap("small_updates")
def test_master_weights_move_at_a_rate_that_bfloat16_cannot_show(tiny: Path) -> None:
    engine = PolicyTrainer(make_config(training={"learning_rate": 1e-6}), tiny)
    rows = make_rows(4)
    start = weights(engine)
    moved = []
    shown = []
    before = start
    for version in range(VERSION, VERSION + 100):
        step(engine, changed(rows, versions=lambda row, v=version: np.full(len(row.versions), v)), version)
        after = weights(engine)
        moved.append(changed_share(before, after))
        shown.append(changed_share(published(before), published(after)))
        before = after
    assert np.mean(moved) > 0.5
    assert np.mean(shown) < 0.02
    assert changed_share(published(start), published(after)) > 0.1, "what bfloat16 masters would have lost"


def published(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in weights.items()}


def changed_share(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    different = torch.cat([(before[name] != after[name]).flatten() for name in before])
    return float(different.float().mean())


@pytest.mark.trap("padded_vocabulary")
def test_padding_ids_of_the_head_get_no_gradient(tiny: Path) -> None:
    engine = PolicyTrainer(make_config(), tiny)
    before = weights(engine)["lm_head.weight"]
    step(engine, make_rows(4))
    after = weights(engine)["lm_head.weight"]
    assert torch.equal(before[50:], after[50:])
    assert not torch.equal(before[:50], after[:50])


@pytest.fixture(scope="module")
def judge(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1).save_pretrained(folder)
    return folder


def test_a_model_without_memory_whose_folder_has_no_head_scores_nothing(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be a reward model: it holds no score\.weight"):
        load_score_model(tiny, "cpu", in_parts=True)


@pytest.mark.parametrize("load", [load_causal_model, load_value_model, load_score_model])
def test_a_model_without_memory_is_filled_or_loaded_whole(
    load: Callable, tiny: Path, judge: Path, tmp_path: Path
) -> None:
    folder = judge if load is load_score_model else tiny
    expected = load(folder, "cpu")
    filled = load(folder, "cpu", in_parts=True)
    assert filled.whole.device.type == "meta"
    filled.share_out(RankMesh())
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    whole = load(tmp_path, "cpu", in_parts=True)
    whole.share_out(RankMesh())
    assert (filled.loaded_whole, whole.loaded_whole) == ("", "its weights are not in safetensors")
    for model in (filled, whole):
        found = model.whole.state_dict()
        assert all(torch.equal(found[name], each) for name, each in expected.whole.state_dict().items())
