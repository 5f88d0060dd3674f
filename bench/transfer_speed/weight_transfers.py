"""Measures the transfer of weights to another process over loopback, beside sockets without anything around them; with
`--host` from shared memory to processes of the same host (shared_weights.py).

Each round moves the same bytes over: a TCP socket that a loop reads, a pair of ZeroMQ sockets with CURVE, the `tcp`
transport with dense parts, and with a difference of which 1 % of the weights changed. A transfer ends when all bytes
are in the memory of the receiver; for the transport they are checked there. The first round is discarded.

What the encrypted sockets reach is the bound that encryption sets on this machine: every weight that crosses tcp is
encrypted. CPU seconds are of both processes with all their threads, from the order until the answer; that of writing
the version into the sender's buffer is before it. They depend less on the load of the machine than wall clock does.

The receiver is a process of its own: `python -m asyncrl.bench.transfer_speed.weight_transfers`.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import zmq

from asyncrl.bench.measurements import RoundValues, at_least, goal_line, number, ratios, table
from asyncrl.bench.transfer_speed.shared_weights import report
from asyncrl.fleet.worker.process_memory import gc_frozen
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.weights.chunk_codec import WireCodec
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.lanes.weights.transports.held_version import CHUNK_BYTES
from asyncrl.lanes.weights.transports.transport_ends import WeightNetwork
from asyncrl.protocols.messages import PROTOCOL, Hello, Published

LOOPBACK = "127.0.0.1"
ROUND_DEADLINE = 120.0
BARE = "bare socket"
CURVE = "ZeroMQ with CURVE"
DENSE = "tcp, dense"
SPARSE = "tcp, sparse"
SIDES = (BARE, CURVE, DENSE, SPARSE)
CHANGED = 0.01
TENSORS = 32


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench transfers", description=__doc__)
    parser.add_argument("--megabytes", type=at_least(1), default=256, help="MiB of weights, in bfloat16")
    parser.add_argument("--host", action="store_true", help="measure processes of one host that share memory instead")
    parser.add_argument("--rounds", type=at_least(2), default=6, help="number of rounds; the first is discarded")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    if options.host:
        print(f"load average {load:.2f} before")
        print("\n".join(report(options.megabytes, options.rounds)))
        return
    with gc_frozen():
        found = asyncio.run(measure(options.megabytes << 20, options.rounds))
    print(f"{options.megabytes} MiB of bfloat16, {options.rounds - 1} rounds, load average {load:.2f} before")
    print("\n".join(transfer_lines(found)))


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """One transfer. sender, receiver: CPU seconds of the processes."""

    seconds: float
    sender: float
    receiver: float


def transfer_lines(found: Mapping[str, "SideTransfers"]) -> Iterator[str]:
    """Yields the table, then each goal with its ratio."""
    bare = found[BARE]
    curve = found[CURVE]
    rows = [
        (
            side,
            f"{each.speed} GB/s",
            str(ratios(each.speed, bare.speed)),
            str(ratios(each.speed, curve.speed)),
            f"{number(each.sender.median)} + {number(each.receiver.median)}",
        )
        for side, each in found.items()
    ]
    yield table(("way", "weights", "of bare", "of what CURVE allows", "CPU s a GB, sender + receiver"), rows)
    dense = found[DENSE]
    sparse = found[SPARSE]
    yield goal_line("dense over the bare socket", ratios(dense.speed, bare.speed).median, 0.7)
    yield goal_line("dense over what CURVE allows", ratios(dense.speed, curve.speed).median, 0.9)
    yield goal_line("CPU of what CURVE allows over dense", ratios(curve.cpu, dense.cpu).median, 0.9)
    yield goal_line("sparse over the bare socket", ratios(sparse.speed, bare.speed).median, 0.7)
    limit = ratios(curve.speed, bare.speed).median
    yield f"  Encryption leaves {number(limit)} of the bare socket, whatever is around it."


@dataclass(frozen=True)
class SideTransfers:
    """The transfers of one side. size: bytes of weights of each."""

    size: int
    rounds: tuple[TimedTransfer, ...]

    @property
    def speed(self) -> RoundValues:
        """Returns gigabytes of weights a second."""
        return RoundValues(tuple(self.size / 1e9 / each.seconds for each in self.rounds))

    @property
    def sender(self) -> RoundValues:
        """Returns CPU seconds a gigabyte."""
        return RoundValues(tuple(each.sender / self.size * 1e9 for each in self.rounds))

    @property
    def receiver(self) -> RoundValues:
        return RoundValues(tuple(each.receiver / self.size * 1e9 for each in self.rounds))

    @property
    def cpu(self) -> RoundValues:
        return RoundValues(tuple(map(sum, zip(self.sender.values, self.receiver.values, strict=True))))


async def measure(size: int, rounds: int) -> dict[str, SideTransfers]:
    """Returns the transfers of each side, without those of the first round."""
    keys = CurveKeys.fresh()
    receiver = await asyncio.to_thread(_start_receiver, size, keys)
    found: dict[str, list[TimedTransfer]] = {side: [] for side in SIDES}
    try:
        async with asyncio.timeout(ROUND_DEADLINE * rounds), asyncio.TaskGroup() as tasks:
            with closing(ZmqWire(keys)) as wire:
                versions = Versions(wire, size, tasks)
                for _ in range(rounds):
                    for side, work in versions.orders(keys, size):
                        found[side].append(await asyncio.to_thread(_ask, receiver, work()))
                versions.close()
    finally:
        receiver.kill()
        receiver.communicate()
    return {side: SideTransfers(size, tuple(values[1:])) for side, values in found.items()}


def _start_receiver(size: int, keys: CurveKeys) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", __name__, str(size), keys.public, keys.secret]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(receiver: "subprocess.Popen[str]", order: dict[str, Any]) -> TimedTransfer:
    """Lets the receiver carry out an order."""
    assert receiver.stdin is not None
    assert receiver.stdout is not None
    before = time.process_time()
    print(json.dumps(order), file=receiver.stdin, flush=True)
    seconds, used = map(float, receiver.stdout.readline().split())
    return TimedTransfer(seconds, time.process_time() - before, used)


class Versions:
    """The sending side: two senders of changing weights, one for each codec, and plain sockets."""

    def __init__(self, wire: ZmqWire, size: int, tasks: asyncio.TaskGroup) -> None:
        self._spec = spec_of_size(size)
        self._weights = torch.randn(size // 2).mul_(0.02).to(torch.bfloat16)
        self._bytes = self._weights.view(torch.uint8).numpy()
        self._senders = {
            codec: network(wire, tasks, "training0", codec).sender(self._spec)
            for codec in (WireCodec.DENSE, WireCodec.SPARSE)
        }
        self._version = 0
        self._places = np.random.default_rng(0)

    def orders(self, keys: CurveKeys, size: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Yields each side with what makes its order."""
        self._version += 1
        changed = self._places.random(size // 2, np.float32) < CHANGED
        self._bytes.view(np.uint16)[changed] ^= 1
        yield BARE, self._offer_bare
        yield CURVE, lambda: self._offer_zmq(keys)
        yield DENSE, lambda: self._offer(WireCodec.DENSE)
        yield SPARSE, lambda: self._offer(WireCodec.SPARSE)

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()

    def _offer(self, codec: WireCodec) -> dict[str, Any]:
        named = {
            tensor.name: part for tensor, part in zip(self._spec.tensors, self._weights.chunk(TENSORS), strict=True)
        }
        published = self._senders[codec].write(0, self._version, named)
        return {"way": codec.name, "published": asdict(published)}

    def _offer_bare(self) -> dict[str, Any]:
        listener = socket.create_server((LOOPBACK, 0))

        def send() -> None:
            with listener, listener.accept()[0] as connection:
                connection.sendall(self._bytes.data)

        threading.Thread(target=send, name="bare sender").start()
        return {"way": "bare", "port": listener.getsockname()[1]}

    def _offer_zmq(self, keys: CurveKeys) -> dict[str, Any]:
        context = zmq.Context()
        sender = context.socket(zmq.PUSH)
        sender.curve_publickey, sender.curve_secretkey = keys.public.encode(), keys.secret.encode()
        sender.curve_server = 1
        port = sender.bind_to_random_port(f"tcp://{LOOPBACK}")

        def send() -> None:
            for start in range(0, len(self._bytes), CHUNK_BYTES):
                sender.send(self._bytes[start : start + CHUNK_BYTES].data, copy=False)
            context.destroy(linger=-1)

        threading.Thread(target=send, name="encrypted sender").start()
        return {"way": "zmq", "port": port}


def spec_of_size(size: int) -> WeightsSpec:
    return WeightsSpec.of({f"layers.{number}.w": (size // 2 // TENSORS,) for number in range(TENSORS)}, "bfloat16")


def network(wire: ZmqWire, tasks: asyncio.TaskGroup, instance: str, codec: WireCodec) -> WeightNetwork:
    hello = Hello("bench", 0, "training", 0, instance, PROTOCOL, "0")
    return WeightNetwork(wire, f"tcp://{LOOPBACK}:*", hello, tasks, codec)


# ---- the receiving process -----------------------------------------------------------------------------------


async def receive(size: int, keys: CurveKeys) -> None:
    """Carries out the orders of standard input, and prints the wall clock and CPU seconds of each."""
    memory = np.zeros(size, np.uint8)
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        with closing(ZmqWire(keys)) as wire:
            ends = {
                codec.name: network(wire, tasks, "generation0", codec).receiver(spec_of_size(size))
                for codec in (WireCodec.DENSE, WireCodec.SPARSE)
            }
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                order = json.loads(line)
                began = time.perf_counter()
                used = time.process_time()
                if order["way"] == "bare":
                    _receive_bare(memory, order["port"])
                elif order["way"] == "zmq":
                    _receive_zmq(memory, order["port"], keys)
                else:
                    published = Published(**order["published"])
                    await ends[order["way"]].fetch(published)
                    ends[order["way"]].tensors(published)
                print(time.perf_counter() - began, time.process_time() - used, flush=True)


def _receive_bare(memory: "np.ndarray[Any, np.dtype[np.uint8]]", port: int) -> None:
    left = memory.data
    with socket.create_connection((LOOPBACK, port)) as connection:
        while left:
            left = left[connection.recv_into(left) :]


def _receive_zmq(memory: "np.ndarray[Any, np.dtype[np.uint8]]", port: int, keys: CurveKeys) -> None:
    context = zmq.Context()
    receiver = context.socket(zmq.PULL)
    keys.set_up_caller(receiver, "tcp://")
    receiver.connect(f"tcp://{LOOPBACK}:{port}")
    for start in range(0, len(memory), CHUNK_BYTES):
        part = memory[start : start + CHUNK_BYTES]
        part[:] = np.frombuffer(receiver.recv(copy=False).buffer, np.uint8)
    context.destroy(linger=0)


if __name__ == "__main__":
    with gc_frozen():  # As in a worker: a full collection beside torch takes 100 ms.
        asyncio.run(receive(int(sys.argv[1]), CurveKeys(sys.argv[2], sys.argv[3])))
