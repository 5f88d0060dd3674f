import numpy as np
import pytest

from asyncrl.lanes.weights.plan.placements import CheckpointTensor, as_box
from asyncrl.lanes.weights.plan.weight_plan import (
    DecoderSizes,
    ParallelLayout,
    generation_ranks,
    make_plan,
    parse_layout,
    place_model,
)

MODEL = DecoderSizes(layers=4, heads=8, kv_heads=2, experts=4)


def held(name: str, shape: tuple[int, ...], layout: str) -> dict[int, list]:
    """Returns the boxes of each rank."""
    parsed = parse_layout(layout)
    placed = place_model([CheckpointTensor(name, shape)], MODEL, parsed, range(parsed.size))[name].held(shape)
    found: dict[int, list] = {}
    for bounds, rank in zip(placed.bounds, placed.ranks.tolist(), strict=True):
        found.setdefault(rank, []).append(as_box(bounds))
    return dict(sorted(found.items()))


def rows(name: str, shape: tuple[int, ...], layout: str, dim: int = 0) -> dict[int, tuple[int, int]]:
    return {rank: box[dim] for rank, (box,) in held(name, shape, layout).items()}


def test_axes_are_read_in_any_order() -> None:
    assert parse_layout("tp2.pp3.dp4") == parse_layout("dp4.tp2.pp3") == ParallelLayout(dp=4, pp=3, tp=2)
    assert parse_layout("fsdp8").size == 8


@pytest.mark.parametrize("text", ["", "tp", "tp2dp4", "2tp", "tp2.tp4", "xp3", "tp2.", "tp2,dp4", "tp-1"])
def test_another_layout_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"a layout is axes with their sizes, joined by dots, as tp2\.pp2\.dp2"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("layout", "said"),
    [("tp0", "at least 1"), ("zero2.tp2", "zero cuts whole tensors"), ("pp5", "more stages"), ("tp3", "through heads"),
     ("ep3", "must divide the number of experts, which is 4"), ("tp2", "no rule says how tp2 cuts conv.weight")],
)  # fmt: skip
def test_a_layout_that_cannot_cut_the_model_is_refused(layout: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        held("conv.weight", (8, 8), layout)


def test_tensor_parallel_ranks_are_the_fastest_and_heads_of_keys_are_replicated() -> None:
    assert rows("layers.0.q_proj.weight", (16, 4), "tp2.dp2") == {0: (0, 8), 1: (8, 16), 2: (0, 8), 3: (8, 16)}
    assert rows("layers.0.down_proj.weight", (4, 16), "tp2", dim=1) == {0: (0, 8), 1: (8, 16)}
    assert rows("layers.0.o_proj.bias", (16,), "tp2") == {0: (0, 16), 1: (0, 16)}
    assert rows("layers.0.k_proj.weight", (4, 4), "tp4") == {0: (0, 2), 1: (0, 2), 2: (2, 4), 3: (2, 4)}


def test_stages_own_their_layers_embedding_and_head() -> None:
    assert list(held("model.embed_tokens.weight", (8, 4), "pp2.tp2")) == [0, 1]
    assert list(held("layers.1.up_proj.weight", (8, 4), "pp2.tp2")) == [0, 1]
    assert list(held("layers.2.up_proj.weight", (8, 4), "pp2.tp2")) == [2, 3]
    assert list(held("lm_head.weight", (8, 4), "pp2.tp2")) == [2, 3]


def test_fsdp_cuts_what_tp_left() -> None:
    assert rows("layers.0.up_proj.weight", (8, 4), "fsdp2.tp2") == {0: (0, 2), 1: (4, 6), 2: (2, 4), 3: (6, 8)}
    assert held("layers.0.down_proj.weight", (4, 8), "fsdp2.tp2")[1] == [((0, 2), (4, 8))]


def test_zero_cuts_flat_ranges() -> None:
    assert held("w", (3, 4), "zero2.dp2") == {
        0: [((0, 1), (0, 4)), ((1, 2), (0, 2))], 1: [((1, 2), (2, 4)), ((2, 3), (0, 4))],
        2: [((0, 1), (0, 4)), ((1, 2), (0, 2))], 3: [((1, 2), (2, 4)), ((2, 3), (0, 4))],
    }  # fmt: skip


def test_experts_have_owners_one_by_one_and_stacked() -> None:
    assert list(held("layers.0.mlp.experts.1.up_proj.weight", (8, 4), "ep2.tp2")) == [0, 1]
    assert list(held("layers.0.mlp.experts.2.up_proj.weight", (8, 4), "ep2.tp2")) == [2, 3]
    assert list(held("layers.0.mlp.gate.weight", (4, 4), "ep2.tp2")) == [0, 1, 2, 3]
    assert rows("layers.0.mlp.experts.gate_up_proj", (4, 8, 8), "ep2") == {0: (0, 2), 1: (2, 4)}


@pytest.mark.parametrize("layout", ["zero3", "dp2.fsdp2", "fsdp2.tp2.pp2", "ep4.dp2"])
def test_every_layout_holds_every_element(layout: str) -> None:
    """A plan to one rank that needs everything would fail otherwise."""
    names = ("self_attn.k_proj", "mlp.experts.0.down_proj", "mlp.experts.3.up_proj", "input_layernorm")
    tensors = [
        CheckpointTensor(f"layers.{n}.{name}.weight", (8,) if "norm" in name else (8, 8))
        for n in range(4)
        for name in names
    ]
    parsed = parse_layout(layout)
    source = place_model(tensors, MODEL, parsed, range(parsed.size))
    target = place_model(tensors, MODEL, ParallelLayout(), [99])
    assert make_plan(tensors, source, target).traffic.received[99] == sum(tensor.bytes for tensor in tensors)


def test_generation_ranks_are_those_of_figure_8() -> None:
    found = generation_ranks(ParallelLayout(tp=4, dp=2), ParallelLayout(tp=2, dp=4))
    assert np.array(found).reshape(4, 2).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    with pytest.raises(ValueError, match="strided ranks need layouts of tp, pp and dp"):
        generation_ranks(ParallelLayout(fsdp=8), ParallelLayout(tp=2, dp=4))
