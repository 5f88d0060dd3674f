"""Plans the transfer of a model's weights from a trainer's layout to a generator's, and prints what it would cost.

Nothing is sent: bytes, senders and operations are those of the plan, and times are its busiest rank's bytes over the
rate of a link in one direction, which no transport can beat. CPU times of planning are measured here.
"""

import argparse
import json
import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from asyncrl.bench.measurements import at_least, goal_line, table
from asyncrl.lanes.weights.plan.placements import CheckpointTensor, Placement, intersections, volumes
from asyncrl.lanes.weights.plan.schedule import schedule_of
from asyncrl.lanes.weights.plan.weight_plan import (
    FORMS,
    DecoderSizes,
    ParallelLayout,
    WeightPlan,
    generation_ranks,
    make_plan,
    parse_layout,
    place_model,
)

T = TypeVar("T")

LINKS = {"nvlink": 450.0, "pcie5": 63.0, "ib400": 50.0, "tcp100g": 12.5, "tcp10g": 1.25}
"""Gigabytes a second of one rank's link in one direction, by its data sheet: NVLink 4, PCIe 5 x16, one 400 Gbit/s port
of InfiniBand, Ethernet."""

UNITS = {"GB/s": 1.0, "MB/s": 1e-3, "Gbit/s": 0.125, "Mbit/s": 0.125e-3}
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}
"""Names of dtypes in safetensors, with those of a plan."""

MAX_HEADER = 100 << 20
"""Bytes of a header that safetensors allows."""


@dataclass(frozen=True, slots=True)
class PlannedTransfer:
    """Holds a plan with what it was made from, and the CPU seconds that it took."""

    tensors: Sequence[CheckpointTensor]
    source: dict[str, Placement]
    destination: dict[str, Placement]
    plan: WeightPlan
    seconds: float


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench weights", description=__doc__)
    parser.add_argument("--plan", nargs=2, required=True, metavar=("TRAINER", "GENERATOR"), help=FORMS)
    parser.add_argument("--model", default="qwen2.5-7b", help=f"{', '.join(MODELS)}, or a folder with safetensors")
    parser.add_argument(
        "--colocated", choices=("strided", "in-order"), help="use the same ranks: in HybridFlow's order, or in order"
    )
    parser.add_argument("--link", action="append", type=_link, help=f"{', '.join(LINKS)}, or a rate such as 50GB/s")
    parser.add_argument(
        "--copies", type=at_least(1), help="copies of a part that leave the trainer; receivers pass it on"
    )
    parser.add_argument("--rounds", type=at_least(1), default=5, help="how often the plan is made; the fastest counts")
    options = parser.parse_args(arguments)
    try:
        layouts = parse_layout(options.plan[0]), parse_layout(options.plan[1])
        planned = plan_transfer(options.model, *layouts, options.colocated, options.copies, options.rounds)
    except ValueError as wrong:
        parser.error(str(wrong))
    links = options.link or [(name, rate) for name, rate in LINKS.items()]
    print(f"{options.model}: {len(planned.tensors)} tensors, {_gb(sum(tensor.bytes for tensor in planned.tensors))}")
    print(f"from {options.plan[0]} to {options.plan[1]}, {options.colocated or 'on ranks of its own'}")
    bound = least_moved(planned.tensors, planned.source, planned.destination)
    print(table(("result", "value"), [*result_rows(planned, bound), *link_rows(planned.plan, links)]))
    print("\n".join(goal_lines(planned, bound)))


def plan_transfer(
    model: str,
    trainer: ParallelLayout,
    generator: ParallelLayout,
    colocated: str | None = None,
    copies: int | None = None,
    rounds: int = 1,
) -> PlannedTransfer:
    """Plans a model's transfer; the time includes the placements. Raises ValueError for what does not fit."""
    tensors, sizes = planned_model(model)
    ranks: Sequence[int] = range(trainer.size, trainer.size + generator.size)
    if colocated == "strided":
        ranks = generation_ranks(trainer, generator)
    elif colocated:
        ranks = range(generator.size)

    def make() -> tuple[dict[str, Placement], dict[str, Placement], WeightPlan]:
        source = place_model(tensors, sizes, trainer, range(trainer.size))
        destination = place_model(tensors, sizes, generator, ranks)
        return source, destination, make_plan(tensors, source, destination, copies=copies)

    (source, destination, plan), seconds = _fastest(make, rounds)
    return PlannedTransfer(tensors, source, destination, plan, seconds)


def result_rows(planned: PlannedTransfer, bound: int) -> list[tuple[str, str]]:
    """Returns label and value of each result. bound: of `least_moved`."""
    plan = planned.plan
    traffic = planned.plan.traffic
    schedule, seconds = _fastest(lambda: schedule_of(plan, traffic.holders[0]), 1)
    parts = sum(len(bucket.parts) for bucket in schedule.sends)
    return [
        ("moved between ranks", f"{_gb(traffic.moved)}, bound {_gb(bound)}: {traffic.moved / max(bound, 1):.4f} of it"),
        ("copied within ranks", _gb(int(traffic.copied.sum()))),
        (
            "senders",
            f"{len(traffic.holders)}; the largest sends {_gb(int(traffic.sent.max()))}, {traffic.sender_balance:.4f} "
            f"of the mean; no plan has less than {_gb(plan.least_sent)}",
        ),
        ("receivers", f"the largest receives {_gb(int(traffic.received.max()))}"),
        (
            "passed on by receivers",
            f"{_gb(int(traffic.relayed.sum()))}, the largest {_gb(int(traffic.relayed.max()))}; up to {plan.copies} "
            "copies leave the trainer",
        ),
        ("plan", f"{planned.seconds * 1e3:.1f} ms of CPU, digest {plan.digest[:16]}"),
        (
            f"schedule of rank {traffic.holders[0]}",
            f"{seconds * 1e3:.1f} ms of CPU, {parts:,} boxes in {len(schedule.sends):,} buckets to send "
            f"in {1 + plan.tensors[-1].wave} waves",
        ),
    ]


def goal_lines(planned: PlannedTransfer, bound: int) -> Iterator[str]:
    traffic = planned.plan.traffic
    yield goal_line("bytes moved over the bound", traffic.moved / max(bound, 1), 1.0, at_most=True)
    yield goal_line("largest sender over the mean", traffic.sender_balance, 1.05, at_most=True)
    yield goal_line("plan, ms of CPU", 1e3 * planned.seconds, 100.0, at_most=True)


def link_rows(plan: WeightPlan, links: Sequence[tuple[str, float]]) -> list[tuple[str, str]]:
    return [(f"over {name}", f"at least {plan.traffic.busiest / rate / 1e9:.4g} s") for name, rate in links]


def least_moved(
    tensors: Sequence[CheckpointTensor], source: dict[str, Placement], destination: dict[str, Placement]
) -> int:
    """Returns the bytes that ranks need and do not hold, counted rank by rank, without a plan."""
    known: dict[tuple[tuple[int, ...], int, int], int] = {}
    total = 0
    for tensor in tensors:
        ends = source[tensor.name], destination[tensor.name]
        key = tensor.shape, id(ends[0]), id(ends[1])
        if key not in known:
            known[key] = _least_elements(tensor.shape, *ends)
        total += known[key] * tensor.item_bytes
    return total


def _least_elements(shape: tuple[int, ...], source: Placement, destination: Placement) -> int:
    held = source.held(shape)
    needed = destination.held(shape)
    missing = int(volumes(needed.bounds).sum())
    for rank in np.intersect1d(held.ranks, needed.ranks):
        _, _, shared = intersections(held.bounds[held.ranks == rank], needed.bounds[needed.ranks == rank])
        missing -= int(volumes(shared).sum())
    return missing


def _link(text: str) -> tuple[str, float]:
    """Reads a link as its name and gigabytes a second."""
    if text in LINKS:
        return text, LINKS[text]
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)(GB/s|MB/s|Gbit/s|Mbit/s)", text)
    if not matched or float(matched[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no link: name one of {', '.join(LINKS)}, or a rate in {', '.join(UNITS)}, such as 50GB/s"
        )
    return text, float(matched[1]) * UNITS[matched[2]]


def _fastest(make: Callable[[], T], rounds: int) -> tuple[T, float]:
    """Returns the last result, and the CPU seconds of the fastest round."""
    seconds = []
    for _ in range(max(1, rounds)):
        began = time.process_time()
        result = make()
        seconds.append(time.process_time() - began)
    return result, min(seconds)


def _gb(size: float) -> str:
    return f"{size / 1e9:,.3f} GB"


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """Holds the values of a published config.json that decide the shapes. intermediate: of one expert, if there are
    experts; tied: the head is the embedding; biases: of q, k and v; head_norms: of each query and key head."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    head: int = 128
    tied: bool = False
    biases: bool = False
    head_norms: bool = False
    experts: int = 0

    @property
    def sizes(self) -> DecoderSizes:
        return DecoderSizes(self.layers, self.heads, self.kv_heads, self.experts)

    def tensors(self) -> list[CheckpointTensor]:
        """Returns the tensors of the checkpoint in bfloat16."""
        return [CheckpointTensor(name, shape) for name, shape in self._shapes()]

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield f"{prefix}input_layernorm.weight", (self.hidden,)
            yield f"{prefix}post_attention_layernorm.weight", (self.hidden,)
            yield from self._attention(f"{prefix}self_attn.")
            yield from self._mlp(f"{prefix}mlp.")
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, self.hidden)

    def _attention(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            yield f"{prefix}{name}_proj.weight", (heads * self.head, self.hidden)
            if self.biases:
                yield f"{prefix}{name}_proj.bias", (heads * self.head,)
            if self.head_norms and name != "v":
                yield f"{prefix}{name}_norm.weight", (self.head,)
        yield f"{prefix}o_proj.weight", (self.hidden, self.heads * self.head)

    def _mlp(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        if self.experts:
            yield f"{prefix}gate.weight", (self.experts, self.hidden)
        for part in [f"experts.{expert}." for expert in range(self.experts)] or [""]:
            yield f"{prefix}{part}gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}{part}up_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}{part}down_proj.weight", (self.hidden, self.intermediate)


MODELS = {
    "qwen2.5-0.5b": PublishedModel(896, 24, 14, 2, 4864, 151936, head=64, tied=True, biases=True),
    "qwen2.5-7b": PublishedModel(3584, 28, 28, 4, 18944, 152064, biases=True),
    "qwen2.5-72b": PublishedModel(8192, 80, 64, 8, 29568, 152064, biases=True),
    "llama-3.1-8b": PublishedModel(4096, 32, 32, 8, 14336, 128256),
    "qwen3-30b-a3b": PublishedModel(2048, 48, 32, 4, 768, 151936, head_norms=True, experts=128),
}
"""Models by name."""


def planned_model(name: str) -> tuple[list[CheckpointTensor], DecoderSizes]:
    """Returns the tensors and sizes of a model. name: a key of MODELS, or a folder with config.json and safetensors.

    Raises ValueError for another name, or a folder that lacks them or has a dtype that no plan knows.
    """
    if name.lower() in MODELS:
        model = MODELS[name.lower()]
        return model.tensors(), model.sizes
    folder = Path(name)
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise ValueError(
            f"{name!r} is no model: name one of {', '.join(MODELS)}, or a folder with config.json and *.safetensors"
        )
    config = json.loads((folder / "config.json").read_text())
    try:
        heads = int(config["num_attention_heads"])
        sizes = DecoderSizes(
            int(config["num_hidden_layers"]),
            heads,
            int(config.get("num_key_value_heads") or heads),
            int(config.get("num_experts") or config.get("num_local_experts") or 0),
        )
    except KeyError as missing:
        raise ValueError(f"{folder / 'config.json'} has no {missing}, which says how the model can be cut") from None
    return [tensor for file in files for tensor in _tensors_of(file)], sizes


def _tensors_of(file: Path) -> list[CheckpointTensor]:
    """Reads the header of a safetensors file: eight bytes of its size, little-endian, then JSON."""
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))
        if not 2 <= size <= MAX_HEADER:
            raise ValueError(f"{file} is no safetensors file: its header would have {size} bytes")
        header: dict[str, Any] = json.loads(opened.read(size))
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} of {file} has dtype {entry['dtype']}; a plan knows {', '.join(DTYPES)}")
        found.append(CheckpointTensor(name, tuple(entry["shape"]), DTYPES[entry["dtype"]]))
    return found
