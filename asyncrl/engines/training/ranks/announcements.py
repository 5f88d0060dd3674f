"""Tells the ranks of a replica what they compute next, in the order that the first of them chooses.

    controller ── values, update ──> rank 0 ── "1/7", "2/7" ──> TCP store ──> ranks 1 and 2

Each rank gets the calls of the controller over a socket of its own, in any order and perhaps not all of them. Ranks
that exchange need one order, so the others follow what rank 0 announces, and not what they are called with.
"""

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from asyncrl.lanes.control.message_codec import decode, encode

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
