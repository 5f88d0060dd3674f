"""Ranks that share out the tokens of rows train, publish and save what one rank does, in half the memory."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.engines.ranks.parallel_layers import attend_in_slices
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.micro_batches import lay_out_rows
from asyncrl.engines.training.models_with_heads import CausalModel, load_causal_model, own_slice, token_logprobs
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step
from asyncrl.errors import ConfigError
from asyncrl.protocols.distribute_collect import THREE_D_PROTO
from asyncrl.protocols.rank_layout import Layout
from tests.unit.engines.training.ranks.stage_process import found_by_ranks, rows_of, trained

PATIENCE = 60.0
LONG = 4096
TRIALS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "steps": 20, "training": {"updates": 2, "micro_batch_tokens": 64}},
    "qwen3": {"family": "qwen3", "steps": 4, "training": {"gradient_checkpointing": True}},
}
Meshes = Callable[[Layout], list[RankMesh]]


@pytest.fixture(scope="module")
def trials(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns what both ranks are given, by name of the trial, with what they found."""
    folder = tmp_path_factory.mktemp("slices")
    made = {name: _trial(trial, make_model) for name, trial in TRIALS.items()}
    found_by_ranks(made, folder, Layout(sp=2))
    return made


def _trial(trial: dict[str, Any], make_model: Callable[..., Path]) -> dict[str, Any]:
    sections = {"task": {"prompts": "none"}, "steps": 100, "model": {"name": "tiny"}}
    training = {"logits_chunk": 16, "learning_rate": 1e-4, **trial["training"]}
    config = Config.model_validate({**sections, "training": training}).model_dump(mode="json", exclude_unset=True)
    return {"model": str(make_model(trial["family"])), "config": config, "steps": trial["steps"], "texts": ""}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRIALS)
def test_two_processes_train_publish_and_save_what_one_rank_does(name: str, trials: dict[str, dict[str, Any]]) -> None:
    trial, (first, last) = trials[name], trials[name]["found"]
    config = Config.model_validate(trial["config"])
    one = PolicyTrainer(config, Path(trial["model"]))
    for expected, found, of_last in zip(trained(one, trial["steps"]), first["steps"], last["steps"], strict=True):
        assert found == of_last, "ranks report the same"
        assert found[:3] == expected[:3]
        assert found[4] == expected[4]
        if expected[0]:
            assert found[3]["loss/policy"] == pytest.approx(expected[3]["loss/policy"], abs=1e-5)
            assert found[3]["grad_norm"] == pytest.approx(expected[3]["grad_norm"], rel=1e-3)
        assert found[3] == pytest.approx(expected[3], rel=1e-2, abs=1e-4)
    for each, tensor in first["weights"].items():
        torch.testing.assert_close(tensor, one.named_tensors()[each], atol=1e-4, rtol=1e-3)
    assert first["digests"] == last["digests"], "copies of the weights have the same bits"
    assert first["canary"] == last["canary"] == pytest.approx(one.canary().logprobs, abs=1e-3)
    assert first["again"] == first["next"], "a resume goes on with the same bits"
    resumed, _ = PolicyTrainer.resume(config, Path(trial["folder"]))
    again = run_step(resumed, rows_of(trial["steps"]), 0, trial["steps"]).metrics
    assert first["next"] == pytest.approx(again, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize(
    ("layout", "family"), [(Layout(sp=2), "qwen2"), (Layout(sp=4), "llama"), (Layout(sp=2, dp=2), "qwen3")]
)
@pytest.mark.parametrize("algorithm", [{}, {"preset": "m2po"}, {"preset": "ppo"}])
def test_slices_count_each_row_once(
    layout: Layout,
    family: str,
    algorithm: dict[str, str],
    make_model: Callable[..., Path],
    make_rows: Callable,
    make_config: Callable,
    thread_meshes: Meshes,
) -> None:
    """Ragged rows, and one shorter than the ranks; passes over the budget are split."""
    draw = np.random.default_rng(5)
    folder = make_model(family, num_key_value_heads=4)
    rows = [replace(row, values=draw.normal(size=len(row.versions)).astype(np.float32)) for row in make_rows(7)]
    rows[1] = _shortest(rows[1])
    config = make_config(training={"max_grad_norm": 1e9, "updates": 2, "micro_batch_tokens": 40}, algorithm=algorithm)
    alone = PolicyTrainer(config, folder)
    expected = run_step(alone, rows, 1, 5)
    parts = THREE_D_PROTO.distribute([1] * len(rows), layout)
    engines = [PolicyTrainer(config, folder, mesh) for mesh in thread_meshes(layout)]
    shares = [[rows[index] for index in part] for part in parts]
    work = [lambda e=e, s=s: run_step(e, s, 1, 5) for e, s in zip(engines, shares, strict=True)]
    for engine, outcome in zip(engines, _side_by_side(work), strict=True):
        assert outcome.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-5)
        assert outcome.trained == expected.trained
        for name, weights in alone.named_tensors().items():
            torch.testing.assert_close(engine.named_tensors()[name], weights, atol=1e-5, rtol=1e-4)


def _shortest(row: TrainRow) -> TrainRow:
    first = {name: getattr(row, name)[:1] for name in ("prompt_ids", "response_ids", "logprobs", "versions", "values")}
    return replace(row, **first)


def test_episodes_over_the_budget_are_cut_in_every_pass(
    make_model: Callable[..., Path], make_episodes: Callable, make_config: Callable, thread_meshes: Meshes
) -> None:
    """The contexts of one row take several passes, each of which is cut."""
    rows = make_episodes(4, spans=([5, -3, 4, 0], [3, 2, 1, -4, 6, 0]))
    config = make_config(training={"micro_batch_tokens": 16})
    folder = make_model("llama")
    expected = run_step(PolicyTrainer(config, folder), rows, 1, 5)
    engines = [PolicyTrainer(config, folder, mesh) for mesh in thread_meshes(Layout(sp=2))]
    for outcome in _side_by_side([lambda e=e: run_step(e, rows, 1, 5) for e in engines]):
        assert outcome.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-5)


def test_each_of_two_ranks_keeps_half_of_the_activations(
    make_model: Callable[..., Path], thread_meshes: Meshes
) -> None:
    """Bytes that autograd keeps of a long row, weights apart. It is a little more than the half, because the output of
    attention is kept by heads and by tokens."""
    folder = make_model("llama", max_position_embeddings=LONG)
    alone = _kept_bytes(load_causal_model(folder, "cpu"))
    models = [load_causal_model(folder, "cpu") for _ in range(2)]
    for model, mesh in zip(models, thread_meshes(Layout(sp=2)), strict=True):
        model.share_out(mesh)
    for kept in _side_by_side([lambda m=m: _kept_bytes(m) for m in models]):
        assert 0.45 * alone < kept < 0.54 * alone


def _kept_bytes(model: CausalModel) -> int:
    draw = np.random.default_rng(1)
    kept = dict[int, int]()
    weights = {each.untyped_storage().data_ptr() for each in model.whole.parameters()}
    held: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # So that no other tensor gets its address.
        return tensor

    prompt = draw.integers(0, 50, LONG - 16)
    response = draw.integers(0, 50, 16)
    rows = lay_out_rows([prompt], [response], 1.0, model.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(model, rows, 1024)
    return sum(kept.values())


def _side_by_side(work: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(work)) as threads:
        return [done.result(PATIENCE) for done in [threads.submit(each) for each in work]]


def test_slices_predict_every_token_once() -> None:
    """Of rows of one token and of seven, and ranks of which one has padding alone."""
    prompts = [np.arange(1), np.arange(3)]
    responses = [np.arange(1), np.arange(5)]
    rows = lay_out_rows(prompts, responses, 1.0, torch.device("cpu"))
    for size in (1, 2, 3, 5, 8):
        found = [own_slice(rows, rank, size) for rank in range(size)]
        assert torch.stack([chosen for _, chosen in found]).sum(0).tolist() == [1] * 6
        whole = torch.cat([own.passes[0].ids for own, _ in found], 1)
        assert torch.equal(whole[:, :7], rows.passes[0].ids)
        for own, chosen in found:
            column = rows.passes[0].positions[chosen] % 7
            state = own.passes[0].positions % own.passes[0].ids.shape[1]
            assert torch.equal(own.passes[0].position_ids[0][state], column)


@pytest.mark.parametrize(
    ("family", "shape", "size", "says"),
    [
        ("gemma", {}, 2, r"sp cuts rows of the families llama, mistral, qwen2, qwen3 .* is gemma; write sp = 1"),
        ("llama", {}, 4, "sp = 4 does not divide num_key_value_heads = 2: write 1 or 2"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 2, r"attend to all earlier tokens"),
    ],
)
def test_models_whose_attention_cannot_be_cut_are_refused(
    family: str, shape: dict[str, Any], size: int, says: str, make_model: Callable[..., Path]
) -> None:
    model = load_causal_model(make_model(family, **shape), "cpu")
    with pytest.raises(ConfigError, match=says):
        attend_in_slices(model.whole, size)
