"""Measures weights from the arena in shared memory to two other processes, beside bare copies and another scheme.

Sides of a round, in turn: both readers copy private memory at once (the limit of the machine); both flip to a version
in the arena; both copy it out of its slot into memory of their own; and two pairs move the same bytes through buckets
in shared memory (bench/rivals/bucketed_shared_memory.py). The readers are processes of their own:
`python -m asyncrl.bench.transfer_speed.shared_weights`.

Wall clock is that of the slower reader, so on a loaded machine a flip has waits for a core in it. CPU time and page
faults are those of a reader's thread; those of a flip are digest and views, each measured again after the flip.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from asyncrl.bench.measurements import RoundValues, goal_line, in_turn, number, ratios, table
from asyncrl.bench.rivals.bucketed_shared_memory import BUCKET_BYTES, receive, send
from asyncrl.lanes.weights.arena import Reader, Writer, open_reader, open_writer
from asyncrl.lanes.weights.slot_memory import WeightsSpec, check_digest, views
from asyncrl.protocols.messages import Published

READERS = 2
TENSORS = 290
"""A model of half a billion weights has so many."""

LIMIT = "two memcpys at once"
FLIP = "flip"
COPY = "copies out of the slot"
BUCKETS = "buckets, sender by sender"
SIDES = (LIMIT, FLIP, COPY, BUCKETS)

Bytes = NDArray[np.uint8]


def report(megabytes: int, rounds: int) -> Iterator[str]:
    """Measures, and yields the lines to print. The first round is discarded."""
    found = {side: Reads(values[1:]) for side, values in measure(megabytes << 20, rounds).items()}
    yield f"{megabytes} MiB of bfloat16 to {READERS} processes of one host, {rounds - 1} rounds"
    yield from host_lines(found)


def host_lines(found: Mapping[str, "Reads"]) -> Iterator[str]:
    """Yields the table, what is in a flip, and each goal with its ratio."""
    limit, flip, copy, buckets = (found[side] for side in SIDES)
    rows = [
        (side, f"{each.seconds} s", str(ratios(each.seconds, limit.seconds)), number(each.values("cpu").median))
        for side, each in found.items()
    ]
    yield table(("way", "until both have it", "of two memcpys", "CPU s of a reader"), rows)
    cpu, digested, viewed = (1e3 * flip.values(field).median for field in ("cpu", "digest", "views"))
    faults = number(flip.values("faults").median)
    repeated = f"repeated, its digest takes {number(digested)} and its views {number(viewed)} ms"
    yield f"  a flip: {number(cpu)} ms of CPU, {faults} page faults; {repeated}"
    # The flip at 1 GB: its digest is of a piece of one tensor in turn, whatever the size.
    yield goal_line("flip, ms of wall clock", 1e3 * flip.seconds.median, 5.0, at_most=True)
    yield goal_line("flip, ms of CPU", cpu, 5.0, at_most=True)
    yield goal_line("copies over two memcpys", ratios(copy.seconds, limit.seconds).median, 1.2, at_most=True)
    yield goal_line("buckets over copies", ratios(buckets.seconds, copy.seconds).median, 10.0)
    yield goal_line("buckets over the flip", ratios(buckets.seconds, flip.seconds).median, 10.0)


class Read(NamedTuple):
    """One order of one reader. seconds: wall clock. cpu: seconds of its thread. faults: of pages. digest, views: CPU
    seconds of these parts of a flip."""

    seconds: float
    cpu: float = 0.0
    faults: int = 0
    digest: float = 0.0
    views: float = 0.0


@dataclass(frozen=True, slots=True)
class Reads:
    """The slower reader of each round."""

    rounds: Sequence[Read]

    @property
    def seconds(self) -> RoundValues:
        return self.values("seconds")

    def values(self, field: str) -> RoundValues:
        return RoundValues(tuple(float(getattr(each, field)) for each in self.rounds))


def measure(size: int, rounds: int) -> Mapping[str, Sequence[Read]]:
    """Returns each side, round by round."""
    spec = spec_of_size(size)
    writer = open_writer(f"asyncrl-bench-{os.getpid()}", spec, "ipc")
    try:
        with tempfile.TemporaryDirectory() as folder, _readers(size, Path(folder)) as readers:
            versions = ArenaVersions(writer, spec, size)
            sides: dict[str, Callable[[], Read]] = {
                LIMIT: lambda: _ask(readers, [{"way": LIMIT}] * READERS),
                FLIP: lambda: _ask(readers, [{"way": FLIP, "published": versions.next()}] * READERS),
                COPY: lambda: _ask(readers, [{"way": COPY, "published": versions.next()}] * READERS),
                BUCKETS: lambda: versions.send_buckets(readers, Path(folder)),
            }
            return in_turn(sides, rounds)
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

    def send_buckets(self, readers: "list[subprocess.Popen[str]]", folder: Path) -> Read:
        """Returns when both receivers have everything, with a sender in a thread of its own for each."""
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
        slower = max((_answer(reader) for reader in readers), key=attrgetter("seconds"))
        seconds = time.perf_counter() - began
        for sender in senders:
            sender.join()
        return slower._replace(seconds=seconds)


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


def _ask(readers: "list[subprocess.Popen[str]]", orders: Sequence[dict[str, Any]]) -> Read:
    """Returns the slower reader."""
    for reader, order in zip(readers, orders, strict=True):
        _order(reader, order)
    return max((_answer(reader) for reader in readers), key=attrgetter("seconds"))


def _order(reader: "subprocess.Popen[str]", order: dict[str, Any]) -> None:
    assert reader.stdin is not None
    print(json.dumps(order), file=reader.stdin, flush=True)


def _answer(reader: "subprocess.Popen[str]") -> Read:
    assert reader.stdout is not None
    return Read(*json.loads(reader.stdout.readline()))


# ---- a reading process ---------------------------------------------------------------------------------------


def read(size: int, address: str) -> None:
    """Carries out the orders of standard input, and prints what each took."""
    spec = spec_of_size(size)
    own, source = ([np.ones(tensor.bytes, np.uint8) for tensor in spec.tensors] for _ in range(2))
    socket = zmq.Context().socket(zmq.REP)
    socket.bind(address)
    reader: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        if "published" in order and reader is None:
            reader = open_reader(Published(**order["published"]), spec)
        published = Published(**order["published"]) if "published" in order else None
        taken = _timed(partial(_carry_out, order["way"], own, source, socket, reader, published))
        if order["way"] == FLIP:
            assert published is not None
            taken = _with_parts(taken, reader, spec, published)
        print(json.dumps(taken), flush=True)


def _carry_out(
    way: str,
    own: Sequence[Bytes],
    source: Sequence[Bytes],
    socket: "zmq.Socket[bytes]",
    reader: Reader,
    published: Published | None,
) -> None:
    if way == LIMIT:
        _copy(own, source)
    elif published is None:
        receive(own, socket)
    else:
        tensors = reader.tensors(published)
        if way == COPY:
            _copy(own, [tensor.view(torch.uint8).numpy() for tensor in tensors.values()])
            reader.check(published)


def _timed(work: Callable[[], object]) -> Read:
    began = time.perf_counter()
    used = time.thread_time()
    faults = _page_faults()
    work()
    return Read(time.perf_counter() - began, time.thread_time() - used, _page_faults() - faults)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _with_parts(taken: Read, reader: Reader, spec: WeightsSpec, published: Published) -> Read:
    """Measures the parts of a flip again, on pages that are mapped by then."""
    slot = reader._slot(published.slot)
    digested = _timed(partial(check_digest, slot, spec, published))
    return taken._replace(digest=digested.cpu, views=_timed(partial(views, slot, spec)).cpu)


def _copy(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


if __name__ == "__main__":
    read(int(sys.argv[1]), sys.argv[2])
