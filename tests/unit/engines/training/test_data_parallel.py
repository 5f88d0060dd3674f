"""Ranks: gradients as of one rank, whatever they have in common."""

import os
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.engines.ranks import rank_mesh
from asyncrl.engines.ranks.rank_mesh import DistributedRanks, RankMesh, RankPlace, Ranks, backend_of, connect_mesh
from asyncrl.engines.training import optimizer
from asyncrl.engines.training.micro_batches import MaskedRow
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import StepOutcome, split_into_updates
from asyncrl.errors import PeerLost, WeightsError
from asyncrl.fleet.worker.rank_meeting import RankMeeting
from asyncrl.protocols.distribute_collect import THREE_D_PROTO
from asyncrl.protocols.rank_layout import Layout
from tests.unit.engines.training.tiny_training import (
    changed,
    drawn,
    make_config,
    make_rows,
    same,
    side_by_side,
    step,
    weights,
)

OnRanks = Callable[..., list[tuple[PolicyTrainer, StepOutcome]]]


@pytest.fixture
def on_ranks(thread_meshes: Callable[[Layout], list[RankMesh]]) -> OnRanks:
    def run(
        config: Config, folder: Path, shares: list[list[TrainRow]], layout: Layout | None = None
    ) -> list[tuple[PolicyTrainer, StepOutcome]]:
        # Loaded one after the other: transformers patches global state while it loads.
        meshes = thread_meshes(layout or Layout(dp=len(shares)))
        engines = [PolicyTrainer(config, folder, mesh) for mesh in meshes]
        return side_by_side([lambda e=e, s=s: (e, step(e, s)) for e, s in zip(engines, shares, strict=True)])

    return run


@pytest.mark.parametrize(("first", "algorithm"), [(4, {}), (0, {}), (4, {"preset": "m2po"})])
@pytest.mark.trap("micro_batches")
def test_two_ranks_train_what_one_does(first: int, algorithm: dict[str, str], tiny: Path, on_ranks: OnRanks) -> None:
    """Ragged rows in uneven shares; one rank may have none at all. The bound of M2PO is that of all ranks."""
    rows = make_rows(10)
    config = make_config(training={"max_grad_norm": 1e9}, algorithm=algorithm)
    alone = PolicyTrainer(config, tiny)
    expected = step(alone, rows)
    (one, report), (other, second) = on_ranks(config, tiny, [rows[:first], rows[first:]])
    assert report.metrics == pytest.approx(expected.metrics, rel=1e-6, abs=1e-6)
    assert second.metrics == report.metrics
    assert report.trained == second.trained == expected.trained
    assert (*report.samples, *second.samples) == expected.samples
    assert same(weights(one), weights(other)), "ranks must not drift apart"
    for ours, whole in zip(_moments(one), _moments(alone), strict=True):
        torch.testing.assert_close(ours, whole, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize(
    ("layout", "family", "algorithm"),
    [
        (Layout(tp=2, dp=2), "llama", {}),
        (Layout(tp=2, dp=2), "llama", {"preset": "ppo"}),
        (Layout(sp=2), "qwen2", {"preset": "m2po"}),
        (Layout(sp=4), "llama", {}),
        (Layout(sp=2, dp=2), "qwen3", {"preset": "ppo"}),
    ],
)
def test_ranks_with_the_same_rows_count_once(
    layout: Layout, family: str, algorithm: dict[str, str], make_model: Callable[..., Path], on_ranks: OnRanks
) -> None:
    """Lets tensor ranks each hold everything: every sum over ranks names the axis along which rows differ. Slices of
    tokens are of ragged rows, one of them shorter than the ranks, in passes over the budget."""
    folder = make_model(family, num_key_value_heads=4)
    rows = changed(make_rows(7), values=drawn(0, 1))
    first = {
        name: getattr(rows[1], name)[:1] for name in ("prompt_ids", "response_ids", "logprobs", "versions", "values")
    }
    rows[1] = replace(rows[1], **first)
    config = make_config(training={"max_grad_norm": 1e9, "updates": 2, "micro_batch_tokens": 40}, algorithm=algorithm)
    alone = PolicyTrainer(config, folder)
    expected = step(alone, rows)
    parts = THREE_D_PROTO.distribute([1] * len(rows), layout)
    for engine, outcome in on_ranks(config, folder, [[rows[index] for index in part] for part in parts], layout):
        assert outcome.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-5)
        assert outcome.trained == expected.trained
        for name, tensor in alone.named_tensors().items():
            torch.testing.assert_close(engine.named_tensors()[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.trap("not_finite")
def test_one_rank_with_a_broken_loss_stops_the_step_of_all(tiny: Path, on_ranks: OnRanks) -> None:
    shares = [make_rows(4), make_rows(4, advantage=float("nan"))]
    outcomes = [outcome for _, outcome in on_ranks(make_config(), tiny, shares)]
    assert [outcome.skipped for outcome in outcomes] == ["not finite", "not finite"]


def _moments(engine: PolicyTrainer) -> list[torch.Tensor]:
    """First moments after one step: the gradients times 0.1."""
    state = engine.optimizer.parts[0].state
    return [state[parameter]["exp_avg"] for parameter in engine.optimizer.parameters]


@pytest.mark.parametrize(
    ("device", "gpus", "has_own_gpu", "backend"),
    [
        ("cpu", 0, False, "gloo"),
        ("cuda", 2, False, "nccl"),
        ("cuda", 1, False, "gloo"),
        ("cuda:1", 2, False, "gloo"),
        ("cuda:1", 2, True, "nccl"),
    ],
)
def test_nccl_connects_ranks_that_share_no_gpu(device: str, gpus: int, has_own_gpu: bool, backend: str) -> None:
    assert backend_of(device, 2, gpus, has_own_gpu=has_own_gpu) == backend


@pytest.mark.timeout(20)  # Less than the 30 seconds of an exchange, more than joining takes on a busy machine.
async def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_said() -> None:
    meeting = RankMeeting()
    meeting.take("")
    with pytest.raises(PeerLost, match=r"2 training ranks did not all join within 0\.2 s \(seen by rank 0"):
        connect_mesh(await meeting.place(1.0), RankPlace(0, Layout(dp=2), "cpu", nullcontext, 0.2, 30.0))


class TwoRanks(DistributedRanks):
    """One of two ranks, of which the other one's tensors are known."""

    def __init__(self, own: torch.Tensor, others: torch.Tensor) -> None:
        self.size = 2
        self._rows = (own, others)

    def gather_equal(self, values: torch.Tensor) -> list[torch.Tensor]:
        own, others = self._rows
        if values.dim() == 1:
            return [torch.tensor([len(own)]), torch.tensor([len(others)])]
        padded = torch.full((max(len(own), len(others)), 3), -7)
        padded[: len(others)] = others
        assert values.shape == padded.shape, "an all-gather needs the same shape on every rank"
        return [values, padded]


@pytest.mark.parametrize(("own", "others"), [(3, 1), (1, 3), (0, 2), (2, 2)])
def test_ranks_with_different_numbers_of_rows_gather_each_row_once(own: int, others: int) -> None:
    rows = torch.arange(3 * (own + others)).reshape(-1, 3)
    gathered = TwoRanks(rows[:own], rows[own:]).gather(rows[:own])
    assert torch.equal(gathered, rows)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_updates_hold_the_same_rows_however_many_ranks_there_are(
    count: int, size: int, updates: int, chance: random.Random
) -> None:
    batch = [(index // 4, index % 4, 0) for index in range(count)]
    rank_of = {key: chance.randrange(size) for key in batch}
    shares = [[part_row(key) for key in batch if rank_of[key] == rank] for rank in range(size)]
    split = [list(split_into_updates(share, batch, updates)) for share in shares]
    assert all(len(parts) == updates for parts in split)
    for update in range(updates):
        found = sorted(item.row.key for parts in split for item in parts[update])
        assert found == batch[update * count // updates : (update + 1) * count // updates]


def part_row(key: tuple[int, int, int]) -> MaskedRow:
    tokens = np.zeros(1, np.int64)
    row = TrainRow(*key, 1, tokens, tokens, tokens.astype(np.float32), tokens, 0.0)
    return MaskedRow(row, np.ones(1, np.bool_), True, tokens)


class Doubling(Ranks):
    """As if a second rank had the same. living: how many of the tensors that it summed before, at each sum."""

    size = 2

    def __init__(self) -> None:
        self.living: list[int] = []
        self._made: list[weakref.ref[torch.Tensor]] = []

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.living.append(sum(each() is not None for each in self._made))
        self._made.append(weakref.ref(values))
        return 2 * values


@pytest.mark.parametrize("bucket", [1, 100, 10**9])
def test_gradients_are_summed_whatever_the_bucket_each_before_the_next_is_made(
    bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "BUCKET", bucket)
    sizes = [(3, 40), (7,), (2, 2), (90,)]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    given = [torch.randn(size) for size in sizes]
    for parameter, gradient in zip(parameters[:-1], given, strict=False):
        parameter.grad = gradient.clone()
    ranks = Doubling()
    optimizer.sum_gradients(RankMesh.of_data(ranks), parameters)
    for parameter, gradient in zip(parameters[:-1], given, strict=False):
        assert torch.equal(parameter.grad, 2 * gradient)
    assert torch.equal(parameters[-1].grad, torch.zeros(90))
    assert ranks.living == [0] * {1: 4, 100: 3, 10**9: 1}[bucket]


def test_ranks_that_drift_apart_write_no_checkpoint(tiny: Path, on_ranks: OnRanks, tmp_path: Path) -> None:
    (one, _), (other, _) = on_ranks(make_config(), tiny, [make_rows(2), make_rows(4)[2:]])
    with torch.no_grad():
        other.named_tensors()["model.norm.weight"][0] += 1e-6
    with pytest.raises(WeightsError, match="no longer hold the same weights"):
        side_by_side([lambda: one.save(tmp_path, {}), lambda: other.save(tmp_path, {})])
    assert not list(tmp_path.iterdir())


def test_the_network_of_the_ranks_is_that_of_their_address_unless_the_user_chose_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (rank_mesh.interface_of("127.0.0.1"), rank_mesh.interface_of("192.0.2.1")) == ("lo", "")
    monkeypatch.setattr(rank_mesh, "interface_of", lambda host: "eth7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    rank_mesh.use_network_of("10.77.0.1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth7", "ib0")
