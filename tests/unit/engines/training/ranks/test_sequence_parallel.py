"""Ranks that share out the tokens of rows see each token once, and keep half of the activations."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.micro_batches import lay_out_rows
from asyncrl.engines.training.models_with_heads import CausalModel, load_causal_model, own_slice, token_logprobs
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import SampleRow
from asyncrl.protocols.rank_layout import Layout
from tests.unit.engines.training.tiny_training import make_config, make_episodes, side_by_side, step

CPU = torch.device("cpu")
LONG = 4096
Meshes = Callable[[Layout], list[RankMesh]]


def test_episodes_over_the_budget_are_cut_in_every_pass(tiny: Path, thread_meshes: Meshes) -> None:
    """The contexts of one row take several passes, each of which is cut."""
    rows = make_episodes(4, spans=([5, -3, 4, 0], [3, 2, 1, -4, 6, 0]))
    config = make_config(training={"micro_batch_tokens": 16})
    expected = step(PolicyTrainer(config, tiny), rows)
    engines = [PolicyTrainer(config, tiny, mesh) for mesh in thread_meshes(Layout(sp=2))]
    for outcome in side_by_side([lambda e=e: step(e, rows) for e in engines]):
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
    for kept in side_by_side([lambda m=m: _kept_bytes(m) for m in models]):
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

    rows = lay_out_rows([SampleRow(draw.integers(0, 50, LONG - 16), draw.integers(0, 50, 16))], model.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(model, rows, 1024)
    return sum(kept.values())


def test_slices_predict_every_token_once() -> None:
    """Of rows of one token and of seven, and ranks of which one has padding alone."""
    rows = lay_out_rows([SampleRow(np.arange(1), np.arange(1)), SampleRow(np.arange(3), np.arange(5))], CPU)
    for size in (1, 2, 3, 5, 8):
        found = [own_slice(rows, rank, size) for rank in range(size)]
        assert torch.stack([chosen for _, chosen in found]).sum(0).tolist() == [1] * 6
        whole = torch.cat([own.passes[0].ids for own, _ in found], 1)
        assert torch.equal(whole[:, :7], rows.passes[0].ids)
        for own, chosen in found:
            column = rows.passes[0].positions[chosen] % 7
            state = own.passes[0].positions % own.passes[0].ids.shape[1]
            assert torch.equal(own.passes[0].position_ids[0][state], column)
