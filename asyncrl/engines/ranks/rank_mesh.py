"""The ranks of a trainer along each axis of its layout, and how they connect.

    everyone   all ranks                                      decide whether an update is taken, and rows are lost
    rows       same part of the model, different rows         sum denominators, counts, metrics
    copies     of these, those with the same weights          sum gradients that no shard sums, but for experts
    shards     of these, those that share out the weights     gather weights, sum the squares of the gradient norm
    experts    of the rows, those that share out experts      give tokens to their experts, sum those squares too
    expert_copies  of the rows, those with the same experts   sum gradients of experts
    tensor     same rows, each with a part of every layer     compute layers together, sum those squares too
    gathering  of these, those whose parts make up a layer    gather weights to generate with; alone in training only
    stages     same rows, each with some of the layers        pass states and gradients on, sum those squares too
    ends       first and last of the stages                   sum the gradient of an embedding that is the head too
    sequence   same rows and weights, a slice of the tokens   exchange heads in attention, join log-probs of tokens

Ranks that hold the same rows (tensor ranks, pipeline stages, slices) never meet in a sum over `rows`, so each row
counts once; slices meet in `copies`, because each has the gradient of its own tokens.
"""

import array
import fcntl
import math
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.errors import PeerLost
from asyncrl.fleet.worker.rank_meeting import MeetingPlace
from asyncrl.lanes.control.message_codec import decode, encode
from asyncrl.protocols.rank_layout import AXES, AXES_OF_EXPERTS, Axis, Layout

# Exchanges along one axis of a trainer's ranks: one rank alone, or processes over torch.distributed.


Exchange = Callable[[], AbstractContextManager[None]]
"""Opens the scope of one exchange, which books its time, and raises PeerLost for what torch raises in it."""


class Ranks:
    """Exchanges tensors between the ranks of a group, which call the same methods in the same order; each call blocks
    the compute thread until all ranks made it. This class is one rank alone, which has nothing to exchange.

    rank, size: number of this rank in its group, and number of ranks in it.
    """

    rank = 0
    size = 1

    def sum(self, values: Tensor) -> Tensor:
        """Sums element-wise over ranks, with the same bits on each; may work in place."""
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Returns the element-wise maximum over ranks; may work in place."""
        return values

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenates the tensors [rows, width] of all ranks in rank order; numbers of rows may differ."""
        return rows

    def gather_equal(self, values: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks in rank order; all have the same shape."""
        return [values]

    def to_each(self, parts: Tensor) -> Tensor:
        """Gives part i of the tensor [ranks, ...] to rank i; returns what each rank gave to this one, in rank order."""
        even = [1] * self.size
        return self.to_each_uneven(parts, even, even)

    def to_each_uneven(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Gives consecutive rows of [rows, ...] to the ranks, sent[i] to rank i; returns those that each rank gave to
        this one, received[i] of rank i, in rank order."""
        return rows

    def shared(self, values: Tensor, source: int) -> Tensor:
        """Returns the values of rank `source` on all ranks, which give tensors like it."""
        return values

    def told(self, value: Any, source: int) -> Any:
        """Returns on all ranks the value of rank `source`, a message or plain values."""
        return self.told_by_each(value if self.rank == source else None)[source]

    def told_by_each(self, value: Any) -> list[Any]:
        """Returns on all ranks the values of each, messages, arrays or plain values, in rank order."""
        frames = [bytes(frame) for frame in encode(value)]
        counts = [int(count) for count in self.gather(torch.tensor([[len(frames)]])).flatten()]
        sizes = self.gather(torch.tensor([len(frame) for frame in frames]).reshape(-1, 1)).flatten().tolist()
        letters = torch.frombuffer(bytearray().join(frames), dtype=torch.uint8)
        stream = self.gather(letters.reshape(-1, 1)).flatten().numpy().tobytes()
        ends = list(accumulate(sizes, initial=0))
        parts = [stream[start:end] for start, end in pairwise(ends)]
        firsts = list(accumulate(counts, initial=0))
        return [decode(parts[first:end]) for first, end in pairwise(firsts)]

    def moved(self, values: Tensor, source: int, target: int = 0) -> Tensor:
        """Returns at rank `target` the values of rank `source`; it gives a tensor like them. Others need not call."""
        return values


class FormerRanks(Ranks):
    """Remembers the place of a rank in a group that it has left: it exchanges nothing any more."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


class DistributedRanks(Ranks):
    """Exchanges over a process group of torch.distributed, on its device. Every method raises PeerLost when another
    rank is gone or late; no exchange works after it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, exchange: Exchange) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._group = group
        self._device = device
        self._exchange = exchange

    def sum(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, rows: Tensor) -> Tensor:
        counts = [int(count) for count in self.gather_equal(torch.tensor([len(rows)]))]
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = self.gather_equal(padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def to_each_uneven(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        moved = rows.to(self._device).contiguous()
        found = moved.new_empty((sum(received), *rows.shape[1:]))
        with self._exchange():  # As bytes, because gloo does not send every dtype.
            parts = (found.view(torch.uint8), moved.view(torch.uint8))
            dist.all_to_all_single(*parts, received, sent, group=self._group)
        return found.to(rows.device)

    def moved(self, values: Tensor, source: int, target: int = 0) -> Tensor:
        if source == target or self.rank not in (target, source):
            return values
        flat = values.detach().to(self._device).contiguous().reshape(-1)
        with self._exchange():
            if self.rank == source:
                dist.send(flat, dist.get_global_rank(self._group, target), self._group)
            else:
                dist.recv(flat, dist.get_global_rank(self._group, source), self._group)
        return flat.reshape(values.shape).to(values.device)

    def shared(self, values: Tensor, source: int) -> Tensor:
        moved = values.detach().to(self._device, copy=self.rank != source).contiguous()
        with self._exchange():  # As bytes, because gloo does not send every dtype.
            dist.broadcast(moved.reshape(-1).view(torch.uint8), dist.get_global_rank(self._group, source), self._group)
        return moved.to(values.device)

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        moved = values.to(self._device)
        with self._exchange():
            dist.all_reduce(moved, operation, self._group)
        return moved.to(values.device)

    def gather_equal(self, values: Tensor) -> list[Tensor]:
        moved = values.to(self._device)
        parts = [torch.empty_like(moved) for _ in range(self.size)]
        with self._exchange():
            dist.all_gather(parts, moved, self._group)
        return [part.to(values.device) for part in parts]


# Tells the ranks of a replica what they compute next, in the order that the first of them chooses.
#
#     controller ── values, update ──> rank 0 ── "1/7", "2/7" ──> TCP store ──> ranks 1 and 2
#
# Each rank gets the calls of the controller over a socket of its own, in any order and perhaps not all of them. Ranks
# that exchange need one order, so the others follow what rank 0 announces, and not what they are called with.


END = "end"
END_DEADLINE = timedelta(seconds=2)


class Announcements:
    """One end of the messages of rank 0, which are numbered from 1; each reader removes its own.

    line: the connection on which a reader waits, which takes nothing else meanwhile. store: another one. wait: seconds
    after which a reader asks again. Errors of the store, which rank 0 serves, are RuntimeError.
    """

    def __init__(self, line: Store, store: Store, rank: int, ranks: int, wait: float) -> None:
        self._line = line
        self._store = store
        self._rank = rank
        self._readers = range(1, ranks)
        self._wait = timedelta(seconds=wait)
        self._number = 0
        self._telling = threading.Lock()  # `end` is called beside the thread that computes and tells.

    def tell(self, message: Any) -> None:
        """Sends the next message, of plain values and messages of the wire without large arrays."""
        (letters,) = encode(message)
        with self._telling:
            self._number += 1
            for reader in self._readers:
                _write(self._store, f"{reader}/{self._number}", bytes(letters))

    def next(self) -> Any:
        """Returns the next message, None after the last one; blocks this thread until it is there."""
        key = f"{self._rank}/{self._number + 1}"
        while not self._is_there(key):
            pass  # Nothing is computed for so long that the wait is repeated.
        letters = self._line.get(key)
        self._number += 1
        self._line.delete_key(key)
        message = decode([letters])
        if message == END:
            _write(self._line, f"{self._rank}/{END}", b"")
            return None
        return message

    def end(self) -> None:
        """Ends the waits of all readers at rank 0, and else that of this one: a wait must not outlive the store, nor
        the process."""
        if self._rank == 0:
            self.tell(END)
            self._store.wait([f"{reader}/{END}" for reader in self._readers], END_DEADLINE)
        else:
            (letters,) = encode(END)
            _write(self._store, f"{self._rank}/{self._number + 1}", bytes(letters))

    def _is_there(self, key: str) -> bool:
        try:
            self._line.wait([key], self._wait)
        except dist.DistStoreError:  # The time is over; a store that is gone is another error.
            return False
        return True


def _write(store: Store, key: str, letters: bytes) -> None:
    store.set(key, letters)  # type: ignore[arg-type]  # Its stub knows text alone.


Waiting = Callable[[], AbstractContextManager[None]]
Part = TypeVar("Part")
ANNOUNCED = "announced"
"""Prefix of the keys of announcements in the store."""
BESIDE: tuple[Axis, Axis] = ("tensor", "stages")
"""Axes of ranks that sample together."""
GLOO = "gloo/"
"""Stands in every error of gloo, which torch raises as a plain RuntimeError: a path of its source."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which gloo and NCCL learn which network interface to use."""
LOOPBACK = ("lo", "lo0")
SIOCGIFADDR = 0x8915
"""Request of ioctl(2) for the address of an interface (netdevice(7)); Linux only."""


@dataclass(frozen=True, eq=False)
class RankMesh:
    """The groups of one rank; this class with its defaults is one rank alone. sharding: the mesh on which weights are
    sharded by FSDP2, splitting: the mesh on which layers are split, routing: the mesh on which experts are shared out,
    piping: the group of the stages; None where there is none. zero: stage of DeepSpeed's ZeRO, by which ranks share out
    moments, gradients and, in stage 3, weights; 0 where they do not. failing: scope in which torch may fail because a
    rank is gone. announcements: of rank 0, where the ranks take their work from it; they then take the parts of a step
    together. service: whose ranks they are. part, parts: which part of the model this rank holds, of how many.
    """

    everyone: Ranks = field(default_factory=Ranks)
    rows: Ranks = field(default_factory=Ranks)
    copies: Ranks = field(default_factory=Ranks)
    shards: Ranks = field(default_factory=Ranks)
    experts: Ranks = field(default_factory=Ranks)
    expert_copies: Ranks = field(default_factory=Ranks)
    tensor: Ranks = field(default_factory=Ranks)
    gathering: Ranks = field(default_factory=Ranks)
    stages: Ranks = field(default_factory=Ranks)
    ends: Ranks = field(default_factory=Ranks)
    sequence: Ranks = field(default_factory=Ranks)
    sharding: DeviceMesh | None = None
    splitting: DeviceMesh | None = None
    routing: DeviceMesh | None = None
    piping: dist.ProcessGroup | None = None
    zero: int = 0
    failing: Exchange = nullcontext
    announcements: Announcements | None = None
    service: str = "training"
    part: int = 0
    parts: int = 1

    @property
    def key(self) -> str:
        """Returns the config key of the layout."""
        return f"{self.service}.layout"

    @property
    def rank(self) -> int:
        return self.everyone.rank

    @property
    def size(self) -> int:
        return self.everyone.size

    @property
    def is_parted(self) -> bool:
        """Returns whether this rank holds parts of weights or moments."""
        meshes = (self.sharding, self.splitting, self.routing)
        return any(mesh is not None for mesh in meshes) or self.stages.size > 1 or self.zero > 0

    @property
    def passes_together(self) -> Ranks:
        """Returns the ranks that run as many passes as this one, or parts of a step."""
        alone = self.sharding is None and self.announcements is None and not self.zero
        return self.experts if alone else self.everyone

    @property
    def gathers(self) -> bool:
        """Returns whether this rank has all parts of its stage that rank 0 asks for: the first of its stage does."""
        return self.tensor.rank == self.rows.rank == self.sequence.rank == 0

    @classmethod
    def of_data(cls, ranks: Ranks) -> "RankMesh":
        """Returns a mesh of data ranks that hold whole weights."""
        return cls(ranks, ranks, ranks)

    def without_exchange(self) -> "RankMesh":
        """Returns the mesh of this rank, in its place among the others, where it exchanges nothing with them."""
        groups = {name: each for name, each in vars(self).items() if isinstance(each, Ranks)}
        silent: dict[str, Any] = {name: FormerRanks(each.rank, each.size) for name, each in groups.items()}
        return replace(self, **silent, failing=nullcontext)

    def pass_budget(self, tokens: int) -> float:
        """Returns the most tokens of one pass, of at most so many in a micro-batch. Passes of sharded weights, of
        stages and of shared out experts are not split further: each is an exchange, and all ranks need as many."""
        exchanging = self.sharding is not None or self.zero > 0 or max(self.stages.size, self.experts.size) > 1
        return math.inf if exchanging else tokens

    def in_step(self, parts: Sequence[list[Part]]) -> list[list[Part]]:
        """Adds empty parts, so that ranks that exchange in every pass, or take each part together, have as many."""
        if self.passes_together.size == 1:
            return list(parts)
        most = int(self.passes_together.largest(torch.tensor([len(parts)])).item())
        return [*parts, *([] for _ in range(most - len(parts)))]


@dataclass(frozen=True, eq=False)
class RankPlace:
    """Tells a rank its place. device: of the config. start: seconds until all ranks must have joined. exchange: seconds
    that one exchange may take, waiting for the slowest rank included. waiting: books the time of every exchange.
    has_own_gpu: `device` is a GPU that no other rank has. service: whose ranks they are. is_led: rank 0 announces what
    all ranks compute. zero: see RankMesh."""

    rank: int
    layout: Layout
    device: str
    waiting: Waiting
    start: float
    exchange: float
    has_own_gpu: bool = False
    service: str = "training"
    is_led: bool = False
    zero: int = 0


def connect_mesh(meeting: MeetingPlace, place: RankPlace) -> RankMesh:
    """Connects the ranks that meet at a TCP store: by NCCL where each has its own GPU, as NCCL requires, else by gloo,
    which copies to the host. Raises PeerLost when not all join."""
    layout = place.layout
    size = place.layout.size
    backend = backend_of(place.device, size, torch.cuda.device_count(), has_own_gpu=place.has_own_gpu)
    device = torch.device(own_device(place.device, place.rank, size) if backend == "nccl" else "cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    with _scope(place, f"did not all join within {place.start:g} s", place.waiting)():
        store = open_store(meeting, place.start)
        store.set(f"joined/{place.rank}", "1")  # gloo would wait for a missing rank as long as for an exchange.
        store.wait([f"joined/{other}" for other in range(size)], timedelta(seconds=place.start))
        timeout = timedelta(seconds=place.exchange)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=size, timeout=timeout)
        chosen = AXES if layout.ep == 1 else AXES + AXES_OF_EXPERTS
        groups = {axis: _own_group(layout.groups(axis), place.rank, timeout) for axis in chosen}
        led = _announcements(meeting, place, store) if place.is_led else None
    late = f"could not exchange within {place.exchange:g} s, or one of them is gone"
    exchange = _scope(place, late, place.waiting)

    def ranks(axis: Axis) -> Ranks:
        group = groups[axis]
        return Ranks() if group is None else DistributedRanks(group, device, exchange)

    axes = {axis: ranks(axis) for axis in groups}
    mesh = _mesh_of_parts(layout, groups, device.type)
    data = [name for name, size in (("dp", layout.dp), ("shard", layout.shard)) if size > 1]
    return RankMesh(
        **axes,
        sharding=mesh[tuple(data)] if mesh is not None and layout.shard > 1 else None,
        splitting=mesh["tp"] if mesh is not None and layout.tp > 1 else None,
        routing=_mesh_of_experts(groups.get("experts"), device.type),
        piping=groups["stages"] if layout.pp > 1 else None,
        zero=place.zero,
        failing=_scope(place, late, nullcontext, only_exchanges=True),
        announcements=led,
        service=place.service,
        part=layout.part(place.rank),
        parts=layout.parts,
    )


def connect_beside(meeting: MeetingPlace, place: RankPlace) -> RankMesh:
    """Connects tensor ranks and stages of a service in processes whose ranks are connected already, as ranks of
    another service, by groups of their own. Raises PeerLost when not all join."""
    layout = place.layout
    size = place.layout.size
    with _scope(place, f"did not all join within {place.start:g} s", place.waiting)():
        store = open_store(meeting, place.start)
        store.set(f"joined/{place.rank}", str(dist.get_rank()))
        joined = [f"joined/{other}" for other in range(size)]
        store.wait(joined, timedelta(seconds=place.start))
        ranks = [int(store.get(key)) for key in joined]
        everyone = _beside(ranks, place)
        sliced, staged = (next(each for each in layout.groups(axis) if place.rank in each) for axis in BESIDE)
        tensor = everyone if layout.pp == 1 else _beside([ranks[each] for each in sliced], place)
        stages = everyone if layout.tp == 1 else _beside([ranks[each] for each in staged], place)
        led = _announcements(meeting, place, store) if place.is_led else None
    late = f"could not exchange within {place.exchange:g} s, or one of them is gone"
    device = torch.device(place.device if dist.get_backend() == "nccl" else "cpu")
    exchange = _scope(place, late, place.waiting)
    own = [Ranks() if each is None else DistributedRanks(each, device, exchange) for each in (everyone, tensor, stages)]
    return RankMesh(everyone=own[0], tensor=own[1], stages=own[2], announcements=led, service=place.service)


def _beside(ranks: list[int], place: RankPlace) -> dist.ProcessGroup | None:
    """Makes a group of ranks of the process; None for one rank. Others do not make it, so these alone agree on it."""
    made: dist.ProcessGroup | None = None
    if len(ranks) > 1:
        made = dist.new_group(ranks, timedelta(seconds=place.exchange), use_local_synchronization=True)
    return made


def _announcements(meeting: MeetingPlace, place: RankPlace, store: Store) -> Announcements:
    line = PrefixStore(ANNOUNCED, open_line(meeting, place.start))
    return Announcements(line, PrefixStore(ANNOUNCED, store), place.rank, place.layout.size, place.exchange)


def _own_group(groups: list[list[int]], own: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Makes the groups of an axis, as every rank has to, and returns this rank's; None where it is alone."""
    if len(groups) == 1:
        return dist.group.WORLD
    found: dist.ProcessGroup | None = None
    for ranks in (each for each in groups if len(each) > 1):
        made = dist.new_group(ranks, timeout)
        found = made if own in ranks else found
    return found


def _mesh_of_parts(layout: Layout, groups: Mapping[Axis, dist.ProcessGroup | None], kind: str) -> DeviceMesh | None:
    """Returns torch's mesh of the axes with several ranks, tp fastest; None where every rank holds whole weights."""
    if layout.shard == layout.tp == 1:
        return None
    sizes = {"dp": layout.dp, "shard": layout.shard, "tp": layout.tp}
    axes: dict[str, Axis] = {"dp": "copies", "shard": "shards", "tp": "tensor"}
    names = [name for name, size in sizes.items() if size > 1]
    own = [group for name in names if (group := groups[axes[name]]) is not None]
    if len(own) == 1:
        return DeviceMesh.from_group(own[0], kind, mesh_dim_names=(names[0],))
    numbers = torch.arange(layout.size).reshape([sizes[name] for name in names])
    return DeviceMesh.from_group(own, kind, numbers, mesh_dim_names=tuple(names))


def _mesh_of_experts(group: dist.ProcessGroup | None, kind: str) -> DeviceMesh | None:
    return None if group is None else DeviceMesh.from_group(group, kind, mesh_dim_names=("ep",))


def _scope(place: RankPlace, failed: str, waiting: Waiting, *, only_exchanges: bool = False) -> Exchange:
    """Returns a scope that raises PeerLost for errors of torch. only_exchanges: for those alone that name a backend,
    because more than exchanges runs in the scope."""

    @contextmanager
    def scope() -> Iterator[None]:
        try:
            with waiting():
                yield
        except RuntimeError as error:
            if only_exchanges and not _is_of_backend(error):
                raise
            ranks = f"the {place.layout.size} {place.service} ranks"
            raise PeerLost(f"{ranks} {failed} (seen by rank {place.rank}: {error})") from error

    return scope


def _is_of_backend(error: BaseException | None) -> bool:
    """Returns whether a backend of torch.distributed raised the error, or one that torch's pipelining wrapped in it."""
    if error is None:
        return False
    return GLOO in str(error) or isinstance(error, dist.DistError) or _is_of_backend(error.__cause__)


def backend_of(device: str, size: int, gpus: int, *, has_own_gpu: bool) -> str:
    """Returns the backend of torch.distributed: NCCL where each rank has a GPU that no other rank has. gpus: those of
    this host. has_own_gpu: `device` is one of a pool."""
    return "nccl" if has_own_gpu or (device == "cuda" and gpus >= size) else "gloo"


def own_device(device: str, rank: int, size: int) -> str:
    """Returns the GPU of this rank where `device` is "cuda"; ranks share GPUs when there are too few."""
    return device if device != "cuda" or size == 1 else f"cuda:{rank % torch.cuda.device_count()}"


def open_store(place: MeetingPlace, seconds: float) -> Store:
    """Serves the store at the rank that listens, connects to it at the others. seconds: that this may take. Raises
    RuntimeError when the store cannot be reached."""
    use_network_of(place.own_host)
    wait = timedelta(seconds=seconds)
    if place.listener is None:
        store = TCPStore(place.host, place.port, None, False, wait, wait_for_workers=False)
    else:
        descriptor = place.listener.detach()  # The store closes it.
        store = TCPStore(place.host, place.port, None, True, wait, wait_for_workers=False, master_listen_fd=descriptor)
    return PrefixStore(place.name, store)


def open_line(place: MeetingPlace, seconds: float) -> Store:
    """Connects to the store once more. Raises RuntimeError when it cannot be reached."""
    wait = timedelta(seconds=seconds)
    return PrefixStore(place.name, TCPStore(place.host, place.port, None, False, wait, wait_for_workers=False))


def use_network_of(host: str) -> None:
    """Has gloo and NCCL use the interface with this address, unless the user chose one. Workers start with loopback
    alone, because torch.distributed would listen where the host's name leads."""
    interface = interface_of(host)
    for name in INTERFACES:
        if interface and os.environ.get(name, LOOPBACK[0]) in LOOPBACK:
            os.environ[name] = interface


def interface_of(host: str) -> str:
    """Returns the network interface that has the address of a host; "" when none of this machine has."""
    wanted = socket.gethostbyname(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            try:
                fcntl.ioctl(asked, SIOCGIFADDR, request)
            except OSError:
                continue  # It has no IPv4 address.
            if socket.inet_ntoa(request.tobytes()[20:24]) == wanted:
                return name
    return ""
