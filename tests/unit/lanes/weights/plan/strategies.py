"""Random placements and tensors for property tests."""

from math import prod

import numpy as np
from hypothesis import strategies as st

from asyncrl.lanes.weights.plan.placements import (
    Box,
    Boxes,
    CheckpointTensor,
    Mesh,
    Placement,
    Replicate,
    Shard,
    flat_shards,
)

shapes = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)
dtypes = st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"])


@st.composite
def meshes(draw: st.DrawFn, dimensions: int, ranks: list[int]) -> Mesh:
    """Some of the ranks in any order, as a mesh of one or two axes: the others own nothing of the tensor."""
    shape = draw(
        st.sampled_from([s for s in [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (1, 2)] if prod(s) <= len(ranks)])
    )
    chosen = draw(st.permutations(ranks))[: prod(shape)]
    cuts = [Replicate(), *(Shard(dim) for dim in range(dimensions))]
    return Mesh(tuple(chosen), shape, tuple(draw(st.sampled_from(cuts)) for _ in shape))


@st.composite
def flat_placements(draw: st.DrawFn, shape: tuple[int, ...], ranks: list[int]) -> Boxes:
    return flat_shards(shape, [draw(st.permutations(ranks))[: draw(st.integers(1, len(ranks)))]])


@st.composite
def overlapping(draw: st.DrawFn, shape: tuple[int, ...], ranks: list[int]) -> Boxes:
    """One rank holds all; others hold any box, so that boxes overlap without being equal."""
    held: dict[int, list[Box]] = {ranks[0]: [tuple((0, size) for size in shape)]}
    for rank in ranks[1:]:
        ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
        if all(start < stop for start, stop in ends):
            held[rank] = [tuple((start, stop) for start, stop in ends)]
    return Boxes.of(held)


def placements(shape: tuple[int, ...], ranks: list[int]) -> st.SearchStrategy[Placement]:
    return st.one_of(meshes(len(shape), ranks), flat_placements(shape, ranks), overlapping(shape, ranks))


@st.composite
def transfers(
    draw: st.DrawFn,
) -> tuple[list[CheckpointTensor], dict[str, Placement], dict[str, Placement]]:
    """Tensors with placements on 1 to 6 ranks of each side, which may be the same ranks, some of them, or others."""
    sources = list(range(draw(st.integers(1, 6))))
    first = draw(st.integers(0, len(sources)))
    targets = list(range(first, first + draw(st.integers(1, 6))))
    tensors = []
    source = dict[str, Placement]()
    destination = dict[str, Placement]()
    for number in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(["layers.{}.weight", "embed.{}", "head{}"])).format(number)
        tensors.append(CheckpointTensor(name, draw(shapes), draw(dtypes)))
        source[name] = draw(placements(tensors[-1].shape, sources))
        destination[name] = draw(placements(tensors[-1].shape, targets))
    return tensors, source, destination


@st.composite
def mesh_transfers(
    draw: st.DrawFn,
) -> tuple[list[CheckpointTensor], dict[str, Placement], dict[str, Placement]]:
    """Many tensors of a few shapes on one source mesh, as a model has them: whether work can be shared matters."""
    data, model = draw(st.sampled_from([(1, 4), (2, 2), (4, 1), (3, 2), (2, 3), (6, 1)]))
    ranks = np.arange(data * model).reshape(data, model)
    generation = draw(st.integers(1, 4))
    first = draw(st.sampled_from([0, data * model]))
    target = Mesh.of(np.arange(first, first + generation), draw(st.sampled_from([Replicate(), Shard(0)])))
    rows = [draw(st.integers(4, 40)) for _ in range(3)]
    tensors = [CheckpointTensor(f"layers.{n}.weight", (rows[n % 3], 8)) for n in range(draw(st.integers(6, 24)))]
    cuts = [draw(st.sampled_from([Shard(0), Shard(1), Replicate()])) for _ in range(3)]
    source = {t.name: Mesh.of(ranks, Replicate(), cuts[n % 3]) for n, t in enumerate(tensors)}
    return tensors, source, {tensor.name: target for tensor in tensors}
