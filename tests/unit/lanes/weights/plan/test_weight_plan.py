"""The plan of a real model: balance, digest, determinism, errors, and schedules that fit each other."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.bench.transfer_speed.weight_plans import least_moved, plan_transfer, planned_model
from asyncrl.errors import WeightsError
from asyncrl.lanes.weights.plan.placements import Boxes, CheckpointTensor, Mesh, Placement, Replicate, Shard
from asyncrl.lanes.weights.plan.schedule import bounded, schedule_of
from asyncrl.lanes.weights.plan.weight_plan import ROUTES, layer, make_plan, parse_layout, place_model
from tests.unit.lanes.weights.plan.transfer_simulation import cover

LAYOUTS = [
    ("tp2.pp2.dp2", "tp4.dp2"), ("zero8", "tp4.dp2"), ("dp1", "dp8"), ("dp4.fsdp4", "tp2.dp2"),
    ("tp4.pp2.dp64", "tp4.dp128"),
]  # fmt: skip
ONE = Mesh.of(np.arange(1), Replicate())
TWO = Mesh.of(np.arange(1, 3), Shard(0))
DIGEST = """
import sys
from asyncrl.bench.transfer_speed.weight_plans import plan_transfer
from asyncrl.lanes.weights.plan.weight_plan import parse_layout
print(plan_transfer("qwen2.5-0.5b", parse_layout("dp2.fsdp3"), parse_layout("tp2.dp5"), copies=2).plan.digest)
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(("trainer", "generator"), LAYOUTS)
def test_qwen_7b_moves_the_bound_from_balanced_senders(trainer: str, generator: str) -> None:
    planned = plan_transfer("qwen2.5-7b", parse_layout(trainer), parse_layout(generator))
    traffic = planned.plan.traffic
    assert traffic.moved == least_moved(planned.tensors, planned.source, planned.destination)
    assert traffic.received.sum() == traffic.moved
    assert traffic.sender_balance <= 1.05
    if traffic.relayed.sum() > 0.05 * traffic.moved:
        assert traffic.relayed.max() <= 1.05 * traffic.received.max()


def test_the_trainer_sends_no_more_copies_than_receivers_have_time_for() -> None:
    traffic = plan_transfer("qwen2.5-7b", parse_layout("fsdp2"), parse_layout("tp2.dp8")).plan.traffic
    assert traffic.sent.max() < 1.01 * traffic.received.max()
    assert traffic.busiest < 1.1 * traffic.received.max()


def test_buckets_are_in_the_order_of_layers_and_bounded() -> None:
    plan = plan_transfer("qwen2.5-0.5b", parse_layout("dp2"), parse_layout("dp2")).plan
    received = schedule_of(plan, 2).receives
    waves = [layer(part.tensor) for bucket in received for part in bucket.parts]
    assert waves == sorted(waves)
    assert [bucket.stage for bucket in received] == sorted(bucket.stage for bucket in received)
    assert max(bucket.bytes for bucket in received) <= plan.bucket_bytes
    assert max(bucket.bytes for bucket in received) > plan.bucket_bytes // 2


@pytest.mark.parametrize("elements", [1, 7, 1000])
def test_a_box_is_cut_into_boxes_that_fit(elements: int) -> None:
    boxes = bounded(((0, 3), (0, 4), (0, 5)), elements)
    assert cover(boxes, (3, 4, 5))
    assert all(np.prod([stop - start for start, stop in box]) <= elements for box in boxes)


def test_layers_are_sorted_by_number() -> None:
    names = ["lm_head.weight", "model.layers.10.w", "model.layers.9.w", "model.embed_tokens.weight"]
    assert sorted(names, key=layer)[:3] == ["model.embed_tokens.weight", "model.layers.9.w", "model.layers.10.w"]


def test_processes_with_other_hash_seeds_compute_the_same_plan_without_torch() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", DIGEST], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
            check=True, timeout=60,
        ).stdout
        for seed in ("0", "77")
    }  # fmt: skip
    assert len(printed) == 1
    assert printed.pop().split()[1] == "False"


def test_different_plans_are_refused_with_the_first_difference() -> None:
    tensors = [CheckpointTensor("a", (4, 2)), CheckpointTensor("b", (4, 2))]
    target = {"a": TWO, "b": TWO}
    ours = make_plan(tensors, {"a": ONE, "b": ONE}, target).summary
    ours.check(make_plan(tensors[::-1], {"b": ONE, "a": ONE}, target).summary)
    for other, said in (
        (
            make_plan([tensors[0], replace(tensors[1], shape=(6, 2))], {"a": ONE, "b": ONE}, target),
            r"b bfloat16 \(6, 2\)",
        ),
        (make_plan(tensors, {"a": ONE, "b": ONE}, {"a": TWO, "b": ONE}), "line 4.*from placement 0 to 0"),
        (make_plan(tensors[:1], {"a": ONE}, target), "nothing more"),
        (make_plan(tensors, {"a": ONE, "b": ONE}, target, bucket_bytes=64), "buckets of 64 bytes"),
        (make_plan(tensors, {"a": TWO, "b": ONE}, target), "line 1.*mesh \\(1 replicate\\).*mesh \\(2 shard 0\\)"),
    ):
        with pytest.raises(WeightsError, match=f"(?s)trainer and generator have different plans.*{said}"):
            ours.check(other.summary)


def test_a_far_difference_of_a_long_line_is_shown() -> None:
    ranks = np.arange(512)
    swapped = np.array([*ranks[:510], 511, 510])
    tensors = [CheckpointTensor("a", (512,))]
    ours, theirs = (make_plan(tensors, {"a": Mesh.of(each, Shard(0))}, {"a": ONE}).summary for each in (ranks, swapped))
    with pytest.raises(WeightsError, match=r"509 510 511'.*509 511 510'") as refused:
        ours.check(theirs)
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize(
    ("source", "destination", "error", "said"),
    [
        ({}, {"w": TWO}, ValueError, "w has no placement at the source"),
        ({"w": ONE}, {}, ValueError, "w has no placement at the destination"),
        ({"w": Mesh.of(np.arange(1), Shard(2))}, {"w": TWO}, ValueError, "w: shard 2 needs"),
        ({"w": Boxes.of({0: [((0, 3), (0, 2))]})}, {"w": TWO}, WeightsError, r"w: ranks \[2\] need the box.*only 2 of"),
    ],
)
def test_what_cannot_be_planned_names_the_tensor(
    source: dict[str, Placement], destination: dict[str, Placement], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make_plan([CheckpointTensor("w", (4, 2))], source, destination)


def test_tensors_that_stand_twice_and_sizes_under_one_are_refused() -> None:
    with pytest.raises(ValueError, match="tensors stand twice in the list: w"):
        make_plan([CheckpointTensor("w", (4, 2))] * 2, {"w": ONE}, {"w": TWO})
    with pytest.raises(ValueError, match="at least 1"):
        make_plan([], {}, {}, copies=0)


def test_512_ranks_are_planned_by_few_patterns() -> None:
    tensors, sizes = planned_model("qwen2.5-7b")
    source = place_model(tensors, sizes, parse_layout("fsdp512"), range(512))
    target = place_model(tensors, sizes, parse_layout("tp4.dp128"), range(512, 1024))
    plan = make_plan(tensors, source, target)
    assert len(tensors) == 339
    assert len({id(each.pattern) for each in plan.tensors}) == 9
    assert len({id(each.route) for each in plan.tensors}) <= ROUTES + 9
    sends = schedule_of(plan, 7).sends
    receives = schedule_of(plan, 600).receives
    assert sum(bucket.bytes for bucket in sends) == plan.traffic.sent[7]
    assert sum(bucket.bytes for bucket in receives) == plan.traffic.received[600]
