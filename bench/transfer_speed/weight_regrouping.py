"""Gathers the weights of a small model over processes, from every training layout to every generation layout on the
same ranks, and compares the bytes that each rank receives with Table 2 of HybridFlow (EuroSys 2025).

Bytes are those that the kernel has counted at the TCP connections of a rank (TCP_INFO). gloo puts a header before each
message; headers are the same for a model of twice the size, so what this one receives more than the smaller one is the
weights alone, to the byte.
"""

import argparse
import json
import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from fractions import Fraction
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from asyncrl.bench.measurements import at_least, goal_line, table
from asyncrl.engines.training.ranks.rank_group import DistributedRanks, Ranks
from asyncrl.engines.training.ranks.rank_store import use_network_of
from asyncrl.engines.training.ranks.weight_gathering import OwnSlice, WeightGathering
from asyncrl.lanes.weights.plan.regrouping import Grouping, Regrouping, Transition
from asyncrl.protocols.rank_layout import Layout

CUT, LAYERS, WIDTHS = 840, 2, (8, 16)
"""Size of the dimension that is cut, which all numbers of ranks up to 8 divide; layers, and the other size of both
models. float32 counts the elements of a tensor exactly."""
BYTES_RECEIVED = 128
"""Offset of tcpi_bytes_received in struct tcp_info (linux/tcp.h)."""
DEADLINE = 300
"""Seconds that the ranks may take: some ten times what they take."""


@dataclass(frozen=True, slots=True)
class MeasuredTransition:
    """Holds what one rank measured, of the larger model minus that of the smaller one: all bytes that training cuts,
    those that the rank received, and those of its training slices that it does not generate with."""

    pp: int
    tp: int
    dp: int
    generation_pp: int
    generation_tp: int
    grouping: Grouping
    rank: int
    model: int
    received: int
    unused: int

    @property
    def excess(self) -> Fraction:
        """Returns the bytes received beyond Table 2."""
        return self.received - self._expected.volume * self.model

    @property
    def _expected(self) -> Transition:
        layout = Layout(self.pp, self.tp, self.dp, self.generation_pp, self.generation_tp)
        return Regrouping(layout, self.grouping).cost(self.rank)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench regroup", description=__doc__)
    parser.add_argument("--ranks", type=at_least(2), default=8, help="processes, and ranks of the largest layout")
    found = measure(parser.parse_args(arguments).ranks)
    head = ("pp-tp-dp", "to pp-tp", "grouping", "received", "of M", "unused", "of M")
    print(table(head, [_row(each) for each in _worst(found)]))
    excess = max(abs(each.excess) for each in found)
    print(goal_line("bytes received beyond Table 2, of any rank", float(excess), 0, at_most=True))
    unused = max(each.unused for each in found if each.grouping == "zero-redundancy")
    print(goal_line("bytes unused with zero-redundancy, of any rank", unused, 0, at_most=True))


def measure(ranks: int) -> list[MeasuredTransition]:
    """Measures every layout of at most so many ranks, in processes that are forked from this one, which has run no
    operation of torch yet. Raises RuntimeError when a rank fails or takes longer than DEADLINE."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-regroup-") as folder:
        fork, until = get_context("fork"), time.monotonic() + DEADLINE
        children = [fork.Process(target=_write_rank, args=(Path(folder), rank, ranks)) for rank in range(ranks)]
        for child in children:
            child.start()
        for child in children:
            child.join(until - time.monotonic())
            child.kill()
            child.join()
        if any(ended := [child.exitcode for child in children]):
            raise RuntimeError(f"a rank failed or took longer than {DEADLINE} s; their exit codes are {ended}")
        lines = [line for rank in range(ranks) for line in (Path(folder) / f"{rank}.jsonl").read_text().splitlines()]
    return [MeasuredTransition(**json.loads(line)) for line in lines]


def layouts(ranks: int) -> Iterator[Layout]:
    """Yields the layouts of at most so many ranks that train stages or slices and generate with fewer or as many."""
    for pp, tp in product(range(1, ranks + 1), repeat=2):
        for dp in range(1, ranks // (pp * tp) + 1):
            sizes = [(deep, wide) for deep in _divisors(pp) for wide in _divisors(tp)]
            yield from (Layout(pp, tp, dp, deep, wide) for deep, wide in sizes if pp * tp > 1)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _worst(found: Sequence[MeasuredTransition]) -> Iterator[MeasuredTransition]:
    """Yields the rank with the most unused bytes of each layout and grouping."""
    worst: dict[tuple[tuple[int, ...], str], MeasuredTransition] = {}
    for each in found:
        key = (each.pp, each.tp, each.dp, each.generation_pp, each.generation_tp), each.grouping
        if key not in worst or worst[key].unused < each.unused:
            worst[key] = each
    yield from worst.values()


def _row(each: MeasuredTransition) -> tuple[str, ...]:
    shares = [str(Fraction(number, each.model)) for number in (each.received, each.unused)]
    sizes = f"{each.pp}-{each.tp}-{each.dp}", f"{each.generation_pp}-{each.generation_tp}", each.grouping
    return (*sizes, str(each.received), shares[0], str(each.unused), shares[1])


def _write_rank(folder: Path, rank: int, ranks: int) -> None:
    """Runs one rank, which writes a line for each of its transitions."""
    torch.set_num_threads(1)
    with (folder / f"{rank}.jsonl").open("w") as file:
        file.writelines(f"{json.dumps(asdict(each))}\n" for each in _run_rank(folder / "store", rank, ranks))


class _MeetingFile:
    """A barrier that sends nothing over a socket."""

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self.store = FileStore(str(path), ranks)
        self._rank = rank
        self._ranks = ranks
        self._count = 0

    def meet(self) -> None:
        self._count += 1
        self.store.set(f"{self._count}/{self._rank}", "")
        self.store.wait([f"{self._count}/{other}" for other in range(self._ranks)], timedelta(seconds=DEADLINE))


def _run_rank(path: Path, rank: int, ranks: int) -> Iterator[MeasuredTransition]:
    use_network_of("127.0.0.1")
    meeting = _MeetingFile(path, rank, ranks)
    wait = timedelta(seconds=DEADLINE)
    dist.init_process_group("gloo", store=meeting.store, rank=rank, world_size=ranks, timeout=wait)
    connected: dict[tuple[int, ...], Ranks] = {}
    for layout in layouts(ranks):
        for grouping in get_args(Grouping):
            regrouping = Regrouping(layout, grouping)
            group = _own_group(regrouping.gathering(), rank, connected)
            found = [_transition(regrouping, rank, group, width, meeting) for width in WIDTHS]
            if rank < layout.size:
                model, received, unused = (large - small for small, large in zip(*found, strict=True))
                sizes = layout.pp, layout.tp, layout.dp, layout.gpp, layout.gtp
                yield MeasuredTransition(*sizes, grouping, rank, model, received, unused)
    meeting.meet()  # The kernel counts the end of a connection as a byte: none closes before all have read theirs.
    dist.destroy_process_group()


def _own_group(groups: Sequence[Sequence[int]], rank: int, connected: dict[tuple[int, ...], Ranks]) -> Ranks:
    """Returns the group of a rank. connected: groups that were used before, which all ranks connect in one order."""
    found = Ranks()
    for members in (tuple(each) for each in groups if len(each) > 1):
        if members not in connected:
            made = dist.new_group(list(members))
            connected[members] = DistributedRanks(made, torch.device("cpu"), nullcontext) if rank in members else found
        found = connected[members] if rank in members else found
    return found


def _transition(
    regrouping: Regrouping, rank: int, group: Ranks, width: int, meeting: _MeetingFile
) -> tuple[int, int, int]:
    """Returns bytes of the model, bytes received, and bytes of this rank's slices that are in nothing it gathered.
    Raises AssertionError unless what it gathered is what it is to generate with."""
    layout = regrouping.layout
    stages = [range(stage * LAYERS, (stage + 1) * LAYERS) for stage in range(layout.pp)]
    whole = {
        f"{layer}.{dim}": (_tensor(width, dim), dim, stage)
        for stage, layers in enumerate(stages)
        for layer in layers
        for dim in (0, 1)
    }
    model = sum(tensor.nbytes for tensor, _, _ in whole.values())
    meeting.meet()
    before = _received()
    meeting.meet()  # No rank sends before all have read their counters.
    if rank >= layout.size:
        return model, 0, 0
    at, gathered = layout.place(rank), {stage for stage, _ in regrouping.gathered(rank)}
    slices = {
        name: OwnSlice(tensor.chunk(layout.tp, dim)[at.tp].to("cpu" if stage == at.pp else "meta"), dim, stage)
        for name, (tensor, dim, stage) in whole.items()
        if stage in gathered
    }
    gathering = WeightGathering(regrouping, rank, group)
    made = gathering.gather(slices, torch.float32)
    received = _received() - before
    stages_needed = {stage for stage, _ in regrouping.needed(rank)}
    assert made.keys() == {name for name, (_, _, stage) in whole.items() if stage in stages_needed}
    for name, each in made.items():
        tensor, dim, _ = whole[name]
        expected = tensor.chunk(layout.gtp, dim)[regrouping.place(rank).tp]
        torch.testing.assert_close(each, expected, rtol=0, atol=0)
    own = {name: part for name, (part, _, stage) in slices.items() if stage == at.pp}
    used = {name: made.get(name, torch.empty(0)) for name in own}
    unused = sum(int((~torch.isin(part, used[name])).sum()) * 4 for name, part in own.items())
    assert 0 <= received - gathering.received < 4096, "headers of gloo take less"
    return model, received, unused


def _tensor(width: int, dim: int) -> Tensor:
    """Returns a tensor whose elements all differ, to be cut along a dimension."""
    shape = (CUT, width) if dim == 0 else (width, CUT)
    return torch.arange(CUT * width, dtype=torch.float32).view(shape)


def _received() -> int:
    """Returns the bytes that the TCP connections of this process have received."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # It is closed by now, or a socket of another kind than TCP.
            if os.readlink(link).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as connection:
                    facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                    total += struct.unpack_from("Q", facts, BYTES_RECEIVED)[0]
    return total
