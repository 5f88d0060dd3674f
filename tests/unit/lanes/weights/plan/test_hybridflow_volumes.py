"""HybridFlow (EuroSys 2025), Table 2: the plan moves exactly the printed bytes to every rank."""

from fractions import Fraction
from typing import Any

import pytest

from asyncrl.bench.transfer_speed.weight_plans import plan_transfer
from asyncrl.lanes.weights.plan.placements import CheckpointTensor
from asyncrl.lanes.weights.plan.weight_plan import (
    DecoderSizes,
    ParallelLayout,
    generation_ranks,
    make_plan,
    parse_layout,
    place_model,
)
from asyncrl.protocols.rank_layout import Layout
from tests.unit.protocols.resharding_cost import formula
from tests.unit.protocols.test_rank_layout import layouts


def volumes(training: ParallelLayout, generation: ParallelLayout, ranks: tuple[int, ...]) -> set[Fraction]:
    """Plans a model that every layout cuts evenly, and returns what ranks receive, as shares of its bytes."""
    size = training.size
    model = DecoderSizes(layers=training.pp, heads=size, kv_heads=size)
    tensors = [
        CheckpointTensor(f"layers.{layer}.{('up_proj', 'down_proj')[layer % 2]}.weight", (size, size))
        for layer in range(model.layers)
    ]
    source = place_model(tensors, model, training, range(size))
    plan = make_plan(tensors, source, place_model(tensors, model, generation, ranks))
    whole = sum(tensor.bytes for tensor in tensors)
    return {Fraction(int(received), whole) for received in plan.traffic.received}


def printed(system: Any, layout: Layout) -> set[Fraction]:
    return {formula(system, layout).volume}


def test_deepspeed_chat_gathers_all_shards_everywhere() -> None:
    for size in (1, 2, 3, 8, 64):
        ranks = tuple(range(size))
        found = volumes(ParallelLayout(fsdp=size), ParallelLayout(dp=size), ranks)
        assert found == printed("DeepSpeed-Chat", Layout(dp=size))
        assert volumes(ParallelLayout(zero=size), ParallelLayout(dp=size), ranks) == found


def test_hybridflow_moves_only_what_the_shard_lacks_and_its_v_the_model_within_a_training_replica() -> None:
    for pp, tp, dp, gpp, gtp in layouts(12):
        training = ParallelLayout(pp=pp, tp=tp, dp=dp)
        size = training.size
        generation = ParallelLayout(pp=gpp, tp=gtp, dp=size // (gpp * gtp))
        found = volumes(training, generation, generation_ranks(training, generation))
        assert found == printed("zero-redundancy", Layout(pp, tp, dp, gpp, gtp)), (training, generation)
        if gpp == gtp == 1:
            found = volumes(training, ParallelLayout(dp=size), tuple(range(size)))
            assert found == printed("vanilla", Layout(pp, tp, dp)), training


@pytest.mark.parametrize(
    ("colocated", "received", "moved", "largest"),
    [("strided", 3.808, 30.46, 3.808), ("in-order", 7.615, 45.69, 7.623)],
)
def test_qwen_7b_from_four_to_two(colocated: str, received: float, moved: float, largest: float) -> None:
    """(4 - 2) / (2 * 4) of 15.23 GB on every rank; in order, ranks whose shards do not overlap receive twice that.
    The busiest sender has 0.1 % more than the least: tensors of one pattern share their routes."""
    traffic = plan_transfer("qwen2.5-7b", parse_layout("tp4.dp2"), parse_layout("tp2.dp4"), colocated).plan.traffic
    assert round(traffic.received.max() / 1e9, 3) == received
    assert round(traffic.moved / 1e9, 2) == moved
    assert round(traffic.sent.max() / 1e9, 3) == largest
