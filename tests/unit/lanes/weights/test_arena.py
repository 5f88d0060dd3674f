"""The arena on both memories: what readers may see, whatever the writer does."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from uuid import uuid4

import pytest
import torch
from torch import Tensor, nn

from asyncrl.errors import Refused, WeightsError
from asyncrl.lanes.weights import slot_memory
from asyncrl.lanes.weights.arena import Reader, Writer, open_reader, open_writer
from asyncrl.lanes.weights.slot_memory import WeightsSpec, spec_of

SHAPES = {"head.weight": (5, 3), "bias": (7,), "scale": ()}


def named(value: float, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    return {name: torch.full(shape, value) for name, shape in shapes.items()}


SPEC = WeightsSpec.of(SHAPES, "float32")
MakeWriter = Callable[[WeightsSpec], Writer]


@pytest.fixture(params=["inproc", "ipc"])
def make_writer(request: pytest.FixtureRequest) -> Iterator[MakeWriter]:
    with ExitStack() as made:
        yield lambda spec: made.enter_context(
            closing(open_writer(f"asyncrl-test-{uuid4().hex[:12]}", spec, request.param))
        )


@pytest.fixture
def writer(make_writer: MakeWriter) -> Writer:
    return make_writer(SPEC)


def test_views_follow_the_arena_without_a_copy_and_outlive_it(writer: Writer) -> None:
    first = writer.write(0, 0, named(1.0))
    reader = open_reader(first, SPEC)
    views = reader.tensors(first)
    assert all(view.data_ptr() % 64 == 0 for view in views.values())
    writer.write(0, 1, named(2.0))
    assert torch.equal(views["bias"], torch.ones(7))
    writer.write(0, 2, named(3.0))
    assert torch.equal(views["bias"], torch.full((7,), 3.0))
    reader.close()
    writer.close()
    del reader, writer
    assert torch.equal(views["bias"], torch.full((7,), 3.0))


def test_a_slot_in_use_cannot_be_written(writer: Writer) -> None:
    writer.write(0, 0, named(1.0))
    writer.leases.using("generation0", 0)
    writer.write(0, 1, named(2.0))
    with pytest.raises(AssertionError, match="generation0"):
        writer.write(0, 2, named(3.0))
    writer.leases.detach("generation0")
    writer.write(0, 2, named(3.0))


def test_half_written_version_is_never_read(writer: Writer) -> None:
    """The writer dies in the middle of version 2; a reader that copies version 0 meanwhile notices."""
    old = writer.write(0, 0, named(1.0))
    new = writer.write(0, 1, named(2.0))
    reader = open_reader(old, SPEC)
    reader.tensors(old)
    with pytest.raises(RuntimeError, match="killed"):
        writer.write(0, 2, Dying(named(3.0), dies_at="bias"))
    with pytest.raises(WeightsError, match="is being written"):
        reader.check(old)
    with pytest.raises(WeightsError, match="is being written"):
        reader.tensors(old)
    assert torch.equal(reader.tensors(new)["bias"], torch.full((7,), 2.0))
    with pytest.raises(Refused, match="holds \\[1\\]"):
        writer.leases.using("late", 2)


class Dying(dict[str, Tensor]):
    """Tensors whose writer dies when it copies one of them."""

    def __init__(self, tensors: dict[str, Tensor], dies_at: str) -> None:
        super().__init__(tensors)
        self._asked: set[str] = set()
        self._dies_at = dies_at

    def __getitem__(self, name: str) -> Tensor:
        if name == self._dies_at and name in self._asked:
            raise RuntimeError("killed")
        self._asked.add(name)
        return super().__getitem__(name)


def test_overwritten_version_is_refused_by_name(writer: Writer) -> None:
    old = writer.write(0, 0, named(1.0))
    writer.write(0, 1, named(2.0))
    newest = writer.write(0, 2, named(3.0))
    reader = open_reader(old, SPEC)
    with pytest.raises(WeightsError, match="holds version 2 of incarnation 0, not version 0"):
        reader.tensors(old)
    reader.check(newest)
    with pytest.raises(WeightsError, match="not version 2 of incarnation 1"):
        reader.check(replace(newest, incarnation=1))


@pytest.mark.parametrize("limit", [slot_memory.FULL_DIGEST_BYTES, 0])
def test_damaged_bytes_are_found(writer: Writer, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_memory, "FULL_DIGEST_BYTES", limit)
    writer.write(0, 0, named(1.0))
    published = writer.write(0, 1, named(1.0))
    assert published.digest_of == ("" if limit else "bias#0")
    reader = open_reader(published, SPEC)
    writer._tensors[1]["bias"][3] = 1.5
    with pytest.raises(WeightsError, match="damaged"):
        reader.tensors(published)


def test_a_digest_is_of_one_piece_of_a_long_tensor(make_writer: MakeWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_memory, "FULL_DIGEST_BYTES", 0)
    monkeypatch.setattr(slot_memory, "PIECE_BYTES", 64)
    spec = WeightsSpec.of({"long": (40,), "short": (3,)}, "float32")
    writer = make_writer(spec)
    tensors = {"long": torch.arange(40.0), "short": torch.zeros(3)}
    named_by = {version: writer.write(0, version, tensors).digest_of for version in range(8)}
    assert [named_by[version] for version in (0, 2, 4, 6)] == ["long#0", "long#1", "long#2", "long#0"]
    assert {named_by[version] for version in (1, 3, 5, 7)} == {"short#0"}
    pieces = [slot_memory.digest_range(spec, f"long#{number}") for number in range(3)]
    assert pieces == [(0, 64), (64, 128), (128, 160)]
    published = writer.write(0, 8, tensors)
    writer._tensors[0]["long"][20] = -1.0
    assert published.digest_of == "long#1"
    with pytest.raises(WeightsError, match="long#1 has digest"):
        open_reader(published, spec).tensors(published)


def test_misfits_are_refused_before_anything_is_written(make_writer: MakeWriter) -> None:
    spec = WeightsSpec.of(SHAPES, "float32", {"tied": "bias"})
    writer = make_writer(spec)
    good = writer.write(0, 0, named(1.0) | {"tied": torch.ones(7)})
    reader: Reader = open_reader(good, spec)
    for change, complaint in (
        ({"extra": torch.ones(1)}, "unknown \\['extra'\\]"),
        ({"bias": torch.ones(8)}, "bias has shape \\(8,\\)"),
        ({"tied": torch.zeros(7)}, "tied and must be equal"),
    ):
        with pytest.raises(WeightsError, match=complaint):
            writer.write(0, 2, named(9.0) | change)
    with pytest.raises(WeightsError, match="missing \\['bias'\\]"):
        writer.write(0, 2, {"head.weight": torch.ones(5, 3), "scale": torch.ones(())})
    assert torch.equal(reader.tensors(good)["bias"], torch.ones(7))


@pytest.mark.trap("padded_vocabulary")
def test_tied_parameters_are_one_tensor_with_two_names() -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    spec = spec_of(model, "float32")
    assert [tensor.name for tensor in spec.tensors] == ["0.weight"]
    assert spec.aliases == (("1.weight", "0.weight"),)
