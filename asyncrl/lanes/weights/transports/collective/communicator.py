"""A pair of ranks that move parts of the weights: the trainer is rank 0, a receiver is rank 1."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

TRAINER, RECEIVER = 0, 1
"""Ranks of a pair."""

GROUP_PARTS = 4
"""Parts that are posted at once: while one is copied, others travel."""


CONNECT_SECONDS = 5.0
"""Seconds in which both ends of a pair must meet: the control wire has just told both."""


class Communicator(Protocol):
    """One end of a pair. Every method but `abort` is called on the thread that connected it."""

    def send(self, parts: Sequence[Tensor], seconds: float) -> None:
        """Sends one-dimensional tensors of bytes as a group; afterwards their memory may change.

        Raises:
            DeadlineExceeded: they were not sent within `seconds`.
            PeerLost: the other end is gone, or the pair was aborted.
        """

    def receive(self, parts: Sequence[Tensor], seconds: float) -> None:
        """Fills tensors with a group that has the same sizes. Raises what `send` raises."""

    def abort(self) -> None:
        """Asks what is under way to end with PeerLost. Returns at once, and may be called on any thread, repeatedly.
        A backend that cannot interrupt a transfer ends it by its deadline."""

    def close(self) -> None:
        """Frees the pair, so that the other end notices. May be called repeatedly."""


class Backend(Protocol):
    """Makes pairs. device: where the memory of parts is. part_bytes: bytes of a part at most."""

    device: str
    part_bytes: int

    def invite(self) -> str:
        """Returns the place, as text, at which the two ends of one new pair meet. Called by the trainer."""

    def connect(self, meeting: str, rank: int, seconds: float) -> Communicator:
        """Connects one end, on the thread that will use it. Raises DeadlineExceeded when the other end does not come
        within `seconds`, and PeerLost when the meeting is gone."""

    def close(self) -> None:
        """Ends further meetings; pairs that are connected stay."""
