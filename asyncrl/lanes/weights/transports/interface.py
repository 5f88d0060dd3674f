"""The two ends of any transport of weights, as a trainer and an engine see them.

write ── Published ── fetch ── tensors ── check
trainer  controller   loop     compute thread of the engine
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from asyncrl.lanes.weights.leases import Fetched, Leases
from asyncrl.protocols.messages import Published


class WeightSender(Protocol):
    """The trainer's side. leases: when a version may be written; without effect where readers copy."""

    leases: Leases

    def write(self, incarnation: int, version: int, named_tensors: Mapping[str, Tensor]) -> Published:
        """Takes a version over, and returns how readers find it. named_tensors has every name of the specification.
        Raises WeightsError when names, shapes or tied tensors do not fit it."""

    def forget(self, reader: str) -> None:
        """Notes that a reader is gone."""

    def close(self) -> None:
        """Frees what readers of a published version find; views that they have stay valid."""


class WeightReceiver(Protocol):
    """An engine's side. What it returned stays valid and unchanged until `tensors` has returned the next version."""

    async def fetch(self, published: Published) -> Fetched:
        """Brings the version to this process, if it has to be copied. The version before stays whole meanwhile, and
        when this fails. Called again, it goes on where it was.

        Raises:
            Refused: the sender does not have the version any more.
            PeerLost: the sender is gone.
            DeadlineExceeded: it did not come in the time that its bytes take over a slow network.
            WeightsError: it cannot be used: damaged more than once, or of another model.
        """

    def tensors(self, published: Published) -> dict[str, Tensor]:
        """Returns the tensors of a fetched version by every name, aliases included. Never write to them. Raises
        WeightsError when they do not match its digest, or are not there."""

    def check(self, published: Published) -> None:
        """Raises WeightsError unless the version is still whole. Who copies asks again afterwards."""

    def close(self) -> None: ...
