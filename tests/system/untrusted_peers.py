"""A program that is not ours and writes to every socket it finds."""

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

HUGE = 2**62
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
"""Of ZMTP 3.0 (RFC 23): signature and version; the mechanism's name and padding follow."""
MORE = 1
LONG = 2
COMMAND = 4
"""Flags of a frame."""
ENDLESS = 64
"""Parts of 64 kB after which the stranger tires of a message that it never ends."""


def greeting(mechanism: bytes) -> bytes:
    return GREETING + mechanism.ljust(20, b"\0") + bytes(32)


def frame(flags: int, body: bytes, announced: int | None = None) -> bytes:
    """announced: the length that it claims, when that is a lie."""
    return struct.pack(">BQ", flags | LONG, len(body) if announced is None else announced) + body


def command(name: bytes, body: bytes) -> bytes:
    return frame(COMMAND, bytes([len(name)]) + name + body)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


READY = command(b"READY", _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b""))
HELLO = command(b"HELLO", b"\x07asyncrl" + b"\x07guessed")
PART = frame(MORE, b"x" * 65_536)

SPEECHES: Sequence[Sequence[bytes]] = (
    (),
    (b"GET / HTTP/1.1\r\n\r\n",),
    (b"\xff" * 4096,),
    (greeting(b"NULL")[:11],),
    (greeting(b"NULL"),),
    (greeting(b"NULL"), READY, frame(0, b"hello"), frame(0, b"junk" * 1000)),
    (greeting(b"NULL"), READY, *[PART] * ENDLESS),
    (greeting(b"NULL"), READY, frame(0, b"x" * 1000, HUGE)),
    (greeting(b"PLAIN"), HELLO, frame(0, b"hello")),
    (greeting(b"PLAIN"), command(b"HELLO", b"\xff")),
    (greeting(b"PLAIN"), frame(COMMAND, b"\x05HELLO" + b"x" * 1000, 200 << 20)),
    (greeting(b"PLAIN"), command(b"INITIATE", b""), *[PART] * ENDLESS),
    (greeting(b"CURVE"), command(b"HELLO", bytes(200))),
    (greeting(b"PLAIN"), *[command(b"ERROR", b"\xff")] * 3),
)
"""What a stranger says after it has connected, piece by piece."""


def speak(connect: Callable[[], socket.socket], speech: Sequence[bytes]) -> None:
    """Say it and hang up. What is not listened to any more is not said."""
    with suppress(OSError), connect() as connected:
        connected.settimeout(1.0)
        for piece in speech:
            connected.sendall(piece)
            with suppress(TimeoutError):
                connected.settimeout(0.02)
                connected.recv(4096)
                connected.settimeout(1.0)


def unix(path: Path) -> Callable[[], socket.socket]:
    def connect() -> socket.socket:
        with ExitStack() as undo:
            connected = undo.enter_context(socket.socket(socket.AF_UNIX))
            connected.settimeout(1.0)
            connected.connect(os.fspath(path))
            undo.pop_all()
        return connected

    return connect


@contextmanager
def at_every_socket(find: Callable[[], Sequence[Path]], seed: int) -> Iterator[list[str]]:
    """While the block runs a stranger speaks at every socket that `find` finds; it keeps the names of those."""
    ended = threading.Event()
    spoken_to = []

    def wander() -> None:
        rng = random.Random(seed)
        while not ended.is_set():
            for path in find():
                noise = tuple(rng.randbytes(rng.randrange(300)) for _ in range(3))
                speak(unix(path), rng.choice((*SPEECHES, noise, (greeting(b"PLAIN"), *noise))))
                spoken_to.append(path.name)
            time.sleep(0.001)

    thread = threading.Thread(target=wander, name="stranger")
    thread.start()
    try:
        yield spoken_to
    finally:
        ended.set()
        thread.join(20)


FLOODERS = 4
"""Strangers that speak at one time."""


@contextmanager
def at_every_port(ports: Sequence[int], seed: int) -> Iterator[list[int]]:
    """While the block runs strangers speak at these ports of this host without a pause; it keeps where they did."""
    ended = threading.Event()
    spoken_to = list[int]()

    def flood(number: int) -> None:
        rng = random.Random(seed + number)
        while not ended.is_set():
            port = rng.choice(ports)
            noise = tuple(rng.randbytes(rng.randrange(300)) for _ in range(3))
            speech = rng.choice((*SPEECHES, noise, (greeting(b"CURVE"), *noise)))
            speak(lambda at=port: socket.create_connection(("127.0.0.1", at), timeout=1.0), speech)
            spoken_to.append(port)

    threads = [threading.Thread(target=flood, args=(number,), name="stranger") for number in range(FLOODERS)]
    for thread in threads:
        thread.start()
    try:
        yield spoken_to
    finally:
        ended.set()
        for thread in threads:
            thread.join(20)
