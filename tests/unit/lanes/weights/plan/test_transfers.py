"""Random placements: what a plan moves arrives, once, and no plan would move less or burden a sender less."""

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.lanes.weights.plan.placements import (
    Boxes,
    CheckpointTensor,
    Mesh,
    Placement,
    Replicate,
    Shard,
)
from asyncrl.lanes.weights.plan.weight_plan import GRAINS, make_plan
from tests.unit.lanes.weights.plan.strategies import mesh_transfers, transfers
from tests.unit.lanes.weights.plan.transfer_simulation import (
    SimulatedTransfer,
    all_schedules,
    least_largest_sender,
    lower_bound,
)

Transfer = tuple[Sequence[CheckpointTensor], Mapping[str, Placement], Mapping[str, Placement]]


@settings(max_examples=80, deadline=None)
@given(transfers(), st.sampled_from([None, 1, 2]), st.sampled_from([4, 16, 1 << 20]))
def test_what_arrives_equals_direct_slicing(transfer: Transfer, copies: int | None, bucket_bytes: int) -> None:
    plan = make_plan(*transfer, copies=copies, bucket_bytes=bucket_bytes)
    simulated = SimulatedTransfer(plan, transfer[1], transfer[2])
    simulated.run()
    simulated.check()
    assert simulated.bytes_sent(relayed=False) == plan.traffic.sent.tolist()
    assert simulated.bytes_sent(relayed=True) == plan.traffic.relayed.tolist()
    assert plan.traffic.moved == plan.traffic.received.sum() == lower_bound(*transfer)
    assert all(b.bytes <= max(4, bucket_bytes) for each in all_schedules(plan) for b in each.sends)


@settings(max_examples=50, deadline=None)
@given(mesh_transfers(), st.sampled_from([None, 1]))
def test_senders_are_balanced_as_well_as_the_placements_allow(transfer: Transfer, copies: int | None) -> None:
    """A row is the smallest thing that is sent; of tensors this small it is as large as several grains."""
    plan = make_plan(*transfer, copies=copies)
    least = least_largest_sender(plan)
    assert plan.least_sent <= least * (1 + 1e-9)
    rows = max(tensor.bytes // tensor.shape[0] for tensor in transfer[0])
    grain = plan.traffic.sent.sum() / len(plan.traffic.holders) / GRAINS
    assert plan.traffic.sent.max() <= 1.05 * least + grain + len(transfer[0]) * rows


@settings(max_examples=20, deadline=None)
@given(transfers(), st.randoms(use_true_random=False))
def test_the_order_of_tensors_and_mappings_changes_nothing(transfer: Transfer, random: "np.random.Generator") -> None:
    tensors, source, destination = transfer
    mixed = list(tensors)
    random.shuffle(mixed)
    turned = make_plan(mixed, dict(reversed(source.items())), dict(reversed(destination.items())))
    plan = make_plan(tensors, source, destination)
    assert plan.digest == turned.digest
    assert all_schedules(plan) == all_schedules(turned)


def test_a_rank_that_holds_what_it_needs_receives_nothing() -> None:
    tensors = [CheckpointTensor("w", (8, 4))]
    half = Mesh.of(np.arange(2), Shard(0))
    whole = Mesh.of(np.arange(2), Replicate())
    traffic = make_plan(tensors, {"w": half}, {"w": whole}).traffic
    assert traffic.copied.tolist() == [32, 32]
    assert traffic.received.tolist() == [32, 32]
    assert make_plan(tensors, {"w": whole}, {"w": half}).traffic.moved == 0


def test_a_holder_with_other_work_sends_less() -> None:
    """Rank 0 alone holds 100 rows; of the 100 rows that both hold, rank 1 sends all."""
    tensors = [CheckpointTensor("a", (100, 1)), CheckpointTensor("b", (100, 1))]
    source = {"a": Mesh.of(np.arange(1), Replicate()), "b": Mesh.of(np.arange(2), Replicate())}
    target = Mesh.of(np.arange(2, 3), Replicate())
    assert make_plan(tensors, source, {"a": target, "b": target}).traffic.sent.tolist() == [200, 200, 0]


def test_one_tensor_is_shared_by_all_of_its_holders() -> None:
    tensors = [CheckpointTensor("w", (640, 3))]
    source = {"w": Mesh.of(np.arange(16), Replicate())}
    target = {"w": Mesh.of(np.arange(16, 19), Replicate())}
    traffic = make_plan(tensors, source, target).traffic
    assert traffic.sender_balance <= 1.05


def test_one_copy_leaves_the_trainer_and_receivers_pass_it_on_along_a_tree() -> None:
    tensors = [CheckpointTensor(f"layers.{n}.w", (8, 8)) for n in range(28)]
    source = Mesh.of(np.arange(1), Replicate())
    target = Mesh.of(np.arange(1, 9), Replicate())
    plan = make_plan(tensors, {t.name: source for t in tensors}, {t.name: target for t in tensors})
    assert plan.copies == 1
    assert plan.traffic.sent.tolist() == [28 * 128, *[0] * 8]
    assert plan.traffic.relayed[1:].max() <= 1.2 * plan.traffic.relayed[1:].mean()
    last = max(bucket.stage for each in all_schedules(plan) for bucket in each.receives)
    assert last == 27 + 3


def test_a_tensor_that_no_rank_needs_is_not_moved() -> None:
    plan = make_plan([CheckpointTensor("w", (4,))], {"w": Mesh.of(np.arange(1), Replicate())}, {"w": Boxes(())})
    assert plan.traffic.moved == 0
    assert make_plan([], {}, {}).traffic.sender_balance == 1.0
