"""Measures weights from the arena in shared memory to two other processes, beside bare copies and another scheme.

Sides of a round, in turn: both readers copy private memory at once (the limit of the machine); both flip to a version
in the arena; both copy it out of its slot into memory of their own; and two pairs move the same bytes through buckets
in shared memory (bench/rivals/bucketed_shared_memory.py). The readers are processes of their own:
`python -m asyncrl.bench.transfer_speed.shared_weights`.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from asyncrl.bench.measurements import RoundValues, goal_line, in_turn, ratios, round_values, table
from asyncrl.bench.rivals.bucketed_shared_memory import BUCKET_BYTES, receive, send
from asyncrl.lanes.weights.arena import Writer, open_reader, open_writer
from asyncrl.lanes.weights.tensor_spec import WeightsSpec
from asyncrl.protocols.messages import Published

READERS = 2
TENSORS = 32
LIMIT, FLIP, COPY, BUCKETS = "two memcpys at once", "flip", "copies out of the slot", "buckets, sender by sender"
SIDES = (LIMIT, FLIP, COPY, BUCKETS)

Bytes = NDArray[np.uint8]


def report(megabytes: int, rounds: int) -> Iterator[str]:
    """Measures, and yields the lines to print. The first round is discarded."""
    found = {side: RoundValues(tuple(values[1:])) for side, values in measure(megabytes << 20, rounds).items()}
    yield f"{megabytes} MiB of bfloat16 to {READERS} processes of one host, {rounds - 1} rounds"
    rows = [(side, f"{found[side]} s", str(ratios(found[side], found[LIMIT]))) for side in SIDES]
    yield table(("way", "until both have it", "of two memcpys"), rows)
    # The flip at 1 GB: its digest is of one tensor in turn, whatever the size.
    yield goal_line("flip, ms", 1e3 * found[FLIP].median, 5.0, at_most=True)
    yield goal_line("copies over two memcpys", ratios(found[COPY], found[LIMIT]).median, 1.2, at_most=True)
    yield goal_line("buckets over copies", ratios(found[BUCKETS], found[COPY]).median, 10.0)
    yield goal_line("buckets over the flip", ratios(found[BUCKETS], found[FLIP]).median, 10.0)


def measure(size: int, rounds: int) -> Mapping[str, Sequence[float]]:
    """Returns the seconds of each side, round by round."""
    spec = spec_of_size(size)
    writer = open_writer(f"asyncrl-bench-{os.getpid()}", spec, "ipc")
    try:
        with tempfile.TemporaryDirectory() as folder, _readers(size, Path(folder)) as readers:
            versions = ArenaVersions(writer, spec, size)
            sides: dict[str, Callable[[], float]] = {
                LIMIT: lambda: _ask(readers, [{"way": LIMIT}] * READERS),
                FLIP: lambda: _ask(readers, [{"way": FLIP, "published": versions.next()}] * READERS),
                COPY: lambda: _ask(readers, [{"way": COPY, "published": versions.next()}] * READERS),
                BUCKETS: lambda: versions.send_buckets(readers, Path(folder)),
            }
            return {side: round_values(in_turn(sides, rounds))[side].values for side in sides}
    finally:
        writer.close()


def spec_of_size(size: int) -> WeightsSpec:
    return WeightsSpec.of({f"layers.{number}.w": (size // 2 // TENSORS,) for number in range(TENSORS)}, "bfloat16")


class ArenaVersions:
    """The sending side. It writes versions outside of what is timed, for a trainer casts its weights into the slot."""

    def __init__(self, writer: Writer, spec: WeightsSpec, size: int) -> None:
        self._writer = writer
        self._weights = {tensor.name: torch.randn(tensor.shape).to(torch.bfloat16) for tensor in spec.tensors}
        self._version = 0

    def next(self) -> dict[str, Any]:
        self._version += 1
        published = self._writer.write(0, self._version, self._weights)
        return {name: value for name, value in asdict(published).items() if name not in ("readers", "canary")}

    def send_buckets(self, readers: "list[subprocess.Popen[str]]", folder: Path) -> float:
        """Returns the seconds until both receivers have everything, with a sender in a thread of its own for each."""
        tensors = [tensor.view(torch.uint8).numpy() for tensor in self._weights.values()]
        bucket_bytes = max(BUCKET_BYTES, max(map(len, tensors)))
        senders = [
            threading.Thread(target=send, args=(tensors, f"ipc://{folder}/{number}", bucket_bytes))
            for number in range(READERS)
        ]
        for reader in readers:
            _order(reader, {"way": BUCKETS})
        began = time.perf_counter()
        for sender in senders:
            sender.start()
        for reader in readers:
            _answer(reader)
        seconds = time.perf_counter() - began
        for sender in senders:
            sender.join()
        return seconds


@contextmanager
def _readers(size: int, folder: Path) -> Iterator["list[subprocess.Popen[str]]"]:
    commands = [[sys.executable, "-m", __name__, str(size), f"ipc://{folder}/{number}"] for number in range(READERS)]
    readers = [subprocess.Popen(each, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for each in commands]
    try:
        yield readers
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()


def _ask(readers: "list[subprocess.Popen[str]]", orders: Sequence[dict[str, Any]]) -> float:
    """Returns the seconds of the slower reader."""
    for reader, order in zip(readers, orders, strict=True):
        _order(reader, order)
    return max(_answer(reader) for reader in readers)


def _order(reader: "subprocess.Popen[str]", order: dict[str, Any]) -> None:
    assert reader.stdin is not None
    print(json.dumps(order), file=reader.stdin, flush=True)


def _answer(reader: "subprocess.Popen[str]") -> float:
    assert reader.stdout is not None
    return float(reader.stdout.readline())


# ---- a reading process ---------------------------------------------------------------------------------------


def read(size: int, address: str) -> None:
    """Carries out the orders of standard input, and prints the seconds of each."""
    spec = spec_of_size(size)
    own, source = ([np.ones(tensor.bytes, np.uint8) for tensor in spec.tensors] for _ in range(2))
    socket = zmq.Context().socket(zmq.REP)
    socket.bind(address)
    reader: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        if "published" in order and reader is None:
            reader = open_reader(Published(**order["published"]), spec)
        began = time.perf_counter()
        if order["way"] == LIMIT:
            _copy(own, source)
        elif order["way"] == BUCKETS:
            receive(own, socket)
        else:
            published = Published(**order["published"])
            views = reader.tensors(published)
            if order["way"] == COPY:
                _copy(own, [views[tensor.name].view(torch.uint8).numpy() for tensor in spec.tensors])
                reader.check(published)
        print(time.perf_counter() - began, flush=True)


def _copy(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


if __name__ == "__main__":
    read(int(sys.argv[1]), sys.argv[2])
