"""Hands weights from a trainer's rank to the generation engine in the same process, and takes their memory back.

    trainer     step ends ── offer(v) ─────────────────────────── put_away ── next step
                                │                                    │
    generation                  └─ take(v), samples ... ends ────────┘

The engine takes a version when the controller announces it, as elsewhere; one that it had already, after a step that
changed nothing, at once. An engine that samples with those of other ranks puts its weights away when all of them do,
and may take a version until then.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from asyncrl.errors import Refused

if TYPE_CHECKING:
    from torch import Tensor


class WeightHandover:
    """Holds the weights of one version until they are taken. All methods are for the event loop of the process.
    trainer_began: set once the start of the trainer has ended. The engine loads after it, since torch imports parts of
    itself on first use, as only one thread may, and engines that sample together connect as the trainer's ranks do."""

    def __init__(self) -> None:
        self.trainer_began = asyncio.Event()
        self._offered: tuple[int, Mapping[str, Tensor]] | None = None
        self._wanted: int | None = None
        self._restore: Callable[[int], Awaitable[None]] | None = None
        self._put_away: Callable[[], Awaitable[None]] | None = None
        self._waits = False

    def attach(
        self, restore: Callable[[int], Awaitable[None]], put_away: Callable[[], Awaitable[None]], *, waits: bool = False
    ) -> None:
        """Connects the engine. restore: takes a version that it took, or wanted, before; put_away: frees its memory.
        waits: the engine may need the offered weights until `put_away` returns, because other ranks sample with it."""
        self._restore = restore
        self._put_away = put_away
        self._waits = waits

    async def offer(self, version: int, tensors: Mapping[str, "Tensor"]) -> None:
        """Offers the weights of a version."""
        self._offered = version, tensors
        if version == self._wanted and self._restore is not None:
            await self._restore(version)

    def take(self, version: int) -> Mapping[str, "Tensor"]:
        """Returns the weights of a version, which are not held here any longer. Raises Refused when the next step has
        begun, after which a newer version is announced, or this one is restored."""
        self._wanted = version
        if self._offered is None or self._offered[0] != version:
            raise Refused(f"the trainer's rank in this process does not hold weights of version {version} for samples")
        _, tensors = self._offered
        self._offered = None
        return tensors

    async def put_away(self) -> None:
        """Frees the memory of weights, keys and values, before a step."""
        if not self._waits:
            self._offered = None
        if self._put_away is not None:
            await self._put_away()
        self._offered = None
