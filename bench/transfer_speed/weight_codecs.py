"""Measures the wire codecs of weights: bytes, and CPU time beside copying the same bytes in the same round.

Weights are random normal numbers in parts of 2 MiB, as they cross a network. For the sparse codec a share of the
elements has changed since the base. Times are CPU seconds of one thread, the median of the rounds, in copies: the time
that copying the dense bytes takes. Encoding includes both digests, whose cost has a row of its own.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.bench.measurements import RoundValues, at_least, goal_line, in_turn, ratios, table
from asyncrl.lanes.weights.codec.chunk import EncodedChunk, WireCodec, decode_chunk, digest, encode_chunk
from asyncrl.lanes.weights.codec.sparse_difference import encode_difference
from asyncrl.lanes.weights.tensor_spec import DTYPES

Bytes = NDArray[np.uint8]
PART = 2 << 20
FEW_CHANGES = 0.01
"""Share of bfloat16 weights that a step of reinforcement learning changes (PULSE, arXiv 2602.03839)."""


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench codecs", description=__doc__)
    parser.add_argument("--megabytes", type=at_least(1), default=64, help="MiB of weights")
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES), help="dtype of the weights")
    parser.add_argument("--changed", type=float, default=FEW_CHANGES, help="share of the weights that changed")
    parser.add_argument("--rounds", type=at_least(1), default=7, help="number of rounds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    measured = CodecRounds.of(options.megabytes << 20, options.dtype, options.changed, options.rounds)
    print(f"{options.megabytes} MiB of {options.dtype}, {options.changed:.2%} changed, {options.rounds} rounds")
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    print(table(("codec", "encode", "decode", "bytes saved", "error"), measured.rows()))
    print("\n".join(measured.goals()))


@dataclass(slots=True)
class CodecRounds:
    """Holds CPU seconds by side, and what each codec made of the weights."""

    seconds: dict[str, RoundValues]
    encoded: dict[str, list[EncodedChunk]]
    size: int

    @classmethod
    def of(cls, size: int, dtype: str, changed: float, rounds: int) -> "CodecRounds":
        base = torch.randn(size // DTYPES[dtype].itemsize).mul_(0.02).to(DTYPES[dtype]).view(torch.uint8).numpy()
        new, item = base.copy(), DTYPES[dtype].itemsize
        elements = new.view(f"u{item}")
        elements[np.random.default_rng(0).random(len(elements), np.float32) < changed] ^= 1
        target, encoded = np.zeros_like(new), dict[str, list[EncodedChunk]]()
        sides: dict[str, Callable[[], None]] = {"copy": partial(np.copyto, target, new)}
        sides["digest"] = partial(_digest, new)
        for kind in WireCodec:
            encoded[kind.name.lower()] = []
            sides[f"encode {kind.name.lower()}"] = partial(_encode, encoded, kind, dtype, new, base)
            sides[f"decode {kind.name.lower()}"] = partial(_decode, encoded, kind, dtype, target, base)
        sides["compare"] = partial(_compare, new, base, item)
        for side in sides.values():
            side()  # First calls touch fresh memory and make tables.
        found = in_turn({name: partial(_cpu_seconds, side) for name, side in sides.items()}, rounds)
        return cls({name: RoundValues(tuple(values)) for name, values in found.items()}, encoded, size)

    def rows(self) -> list[tuple[str, ...]]:
        """Returns a row for each codec, and those of a digest and of a comparison without digests."""
        rows = []
        for name, chunks in self.encoded.items():
            kinds = {chunk.kind.name.lower() for chunk in chunks}
            label = name if kinds == {name} else f"{name} (travels {', '.join(sorted(kinds))})"
            saved, error = 1 - 1 / self.factor(name), max(chunk.error for chunk in chunks)
            encode, decode = self.copies(f"encode {name}"), self.copies(f"decode {name}")
            rows.append((label, encode, decode, f"{saved:.1%}", f"{error:.4f}"))
        rows.append(("difference without digests", self.copies("compare"), "", "", ""))
        return [*rows, ("digest of all bytes", self.copies("digest"), self.copies("digest"), "", "")]

    def goals(self) -> list[str]:
        sparse = ratios(self.seconds["compare"], self.seconds["copy"])
        return [
            goal_line("encode a difference, in copies", sparse.median, 4.0, at_most=True),
            goal_line("fewer bytes of a difference", self.factor("sparse"), 20.0),
            goal_line("share of bytes that FP8 saves", 1 - 1 / self.factor("fp8"), 0.58),
        ]

    def copies(self, side: str) -> str:
        return f"{ratios(self.seconds[side], self.seconds['copy'])} copies"

    def factor(self, name: str) -> float:
        """Returns how many times fewer bytes travel."""
        return self.size / sum(len(chunk.data) for chunk in self.encoded[name])


def _parts(size: int) -> list[slice]:
    return [slice(start, start + PART) for start in range(0, size, PART)]


def _encode(encoded: dict[str, list[EncodedChunk]], kind: WireCodec, dtype: str, new: Bytes, base: Bytes) -> None:
    encoded[kind.name.lower()] = [encode_chunk(kind, new[part], dtype, base[part]) for part in _parts(len(new))]


def _decode(encoded: dict[str, list[EncodedChunk]], kind: WireCodec, dtype: str, target: Bytes, base: Bytes) -> None:
    for chunk, part in zip(encoded[kind.name.lower()], _parts(len(target)), strict=True):
        decode_chunk(chunk, dtype, target[part], base[part])


def _compare(new: Bytes, base: Bytes, item: int) -> None:
    for part in _parts(len(new)):
        encode_difference(new[part], base[part], item)


def _digest(new: Bytes) -> None:
    for part in _parts(len(new)):
        digest(new[part])


def _cpu_seconds(work: Callable[[], None]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
