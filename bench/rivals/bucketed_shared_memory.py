"""The scheme by which verl moves weights on one host without a device, in our own words: one sender for each receiver.

    sender: makes a segment of 512 MB anew for each sync, fills it with tensors ── request ── receiver: copies them out
            waits for the reply, fills it again, and at the end removes it     ── reply ───

Described from verl of 2026-08 (`BucketedWeightSender` with shared memory): cold pages in each sync, two copies of each
byte for each receiver, and sender and receiver taking turns.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import numpy as np
import zmq
from numpy.typing import NDArray

from asyncrl.lanes.shared_memory import Segment

BUCKET_BYTES = 512 << 20
DEADLINE_MS = 60_000
"""Milliseconds that either side waits for the other."""

Bytes = NDArray[np.uint8]


def buckets(sizes: Sequence[int], bucket_bytes: int) -> Iterator[list[tuple[int, int]]]:
    """Yields buckets of (tensor, offset). A tensor that is larger than a bucket is no part of this measurement."""
    bucket: list[tuple[int, int]] = []
    used = 0
    for number, size in enumerate(sizes):
        assert size <= bucket_bytes
        if used + size > bucket_bytes:
            yield bucket
            bucket = []
            used = 0
        bucket.append((number, used))
        used += size
    yield bucket


def send(tensors: Sequence[Bytes], address: str, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Sends all tensors to the receiver at the address."""
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.rcvtimeo = DEADLINE_MS
    socket.connect(address)
    segment = Segment.create(f"asyncrl-bench-{uuid4().hex[:12]}", bucket_bytes)
    memory = np.frombuffer(segment.buffer, np.uint8)
    assert segment.path is not None
    try:
        for bucket in buckets([len(tensor) for tensor in tensors], bucket_bytes):
            for number, offset in bucket:
                memory[offset : offset + len(tensors[number])] = tensors[number]
            socket.send_string(json.dumps({"name": segment.path.name, "bucket": bucket}))
            socket.recv()
        socket.send_string(json.dumps(None))
        socket.recv()
    finally:
        del memory
        segment.unlink()
        segment.close()
        context.destroy(linger=0)


def receive(tensors: Sequence[Bytes], socket: "zmq.Socket[bytes]") -> None:
    """Fills all tensors from a sender. socket: REP, bound."""
    while (order := json.loads(socket.recv())) is not None:
        segment = Segment.open(Path(order["name"]).name)
        memory = np.frombuffer(segment.buffer, np.uint8)
        for number, offset in order["bucket"]:
            tensors[number][:] = memory[offset : offset + len(tensors[number])]
        del memory
        segment.close()
        socket.send(b"")
    socket.send(b"")
