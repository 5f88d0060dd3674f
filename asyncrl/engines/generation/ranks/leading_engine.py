"""The engine of the rank that leads a replica: it tells the other ranks each call, and what its clock says.

    leader     submit ── told ──> step ── told ──> sums ... sums ── step ── sums ... ── end of the slice ── load ── told
                 │                  │                │                │                        │               │
    follower   submit             steps <───────── exchanges of the group of ranks ───────────>              load

All that changes the state of an engine has one place in one order, which is the leader's. A call that exchanges is told
before it runs, so that the others meet it; every other call after it has succeeded. The steps of a slice are one call:
each announces itself in the group, because a message for each would take as long as a small step. After an error the
others may wait in an exchange that the next one would meet, so that none follows.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.generation.ranks.engine_calls import Call, plain_request, plain_tokens
from asyncrl.engines.generation.scheduling.block_pool import Ints
from asyncrl.engines.generation.scheduling.sample_requests import NO_WEIGHTS, Completion, Finish, Key, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.errors import PeerLost, Refused, WeightsError
from asyncrl.protocols.batch import SampleName

NO_STEP = math.nan
"""Announced in place of the clock where a slice ends."""
UNCHANGED = (Refused, WeightsError)
"""Errors of calls that have changed nothing yet, before they are told."""


class LeadingEngine(TorchEngine):
    """A TorchEngine whose calls the other ranks of its replica repeat. Steps stand in the scope of `slice`.

    ranks: of the replica, of which this is rank 0. tell: gives a call to all others, in this order, on the compute
    thread. Calls that exchange raise PeerLost when another rank is gone or late, and all calls once there is a failure.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        version: int = NO_WEIGHTS,
        *,
        ranks: RankMesh,
        tell: Callable[[Call], None],
    ) -> None:
        assert ranks.rank == 0, "the first rank leads"
        super().__init__(folder, config, version, ranks)
        self._tell = tell
        self._clock = time.monotonic
        self._now = 0.0
        self._is_stepping = False
        self._batch.clock = lambda: self._now

    def submit(self, *requests: SampleRequest) -> None:
        plain = [plain_request(request) for request in requests]
        with self._told("submit", plain):
            super().submit(*requests)

    def end(self, keys: Iterable[Key], finish: Finish) -> list[Completion]:
        wanted = list(dict.fromkeys(keys))
        if not wanted:
            return []
        with self._told("end", [list(key) for key in wanted], finish):
            return super().end(wanted, finish)

    def forget(self, samples: Iterable[SampleName], oldest: int) -> None:
        given_up = list(samples)
        if len(self.parked):
            with self._told("forget", [list(sample) for sample in given_up], oldest):
                super().forget(given_up, oldest)

    def begin_again(self) -> None:
        with self._told("begin_again"):
            super().begin_again()

    def load(self, tensors: Mapping[str, Tensor], version: int, *, share: bool) -> None:
        with self._told("load", version):
            super().load(tensors, version, share=share)

    def put_away(self) -> None:
        with self._told("put_away"):
            super().put_away()

    def logprobs_after(self, prompt: Ints) -> NDArray[np.float32]:
        with self._told("logprobs_after", plain_tokens(prompt), first=True):
            return super().logprobs_after(prompt)

    @contextmanager
    def slice(self) -> Iterator[None]:
        with self._for_all_ranks():
            yield
            self._end_slice()

    def step(self) -> list[Completion]:
        with self._for_all_ranks():
            self._now = self._clock()
            if not self._is_stepping:
                self._tell(("step", self._now))
                self._is_stepping = True
            self._announce(self._now)
            return super().step()

    @contextmanager
    def _told(self, name: str, *args: Any, first: bool = False) -> Iterator[None]:
        """Tells a call, before it runs or else after it has succeeded."""
        with self._for_all_ranks(*(() if first else UNCHANGED)):
            self._end_slice()
            self._now = self._clock()
            call = (name, self._now, *args)
            if first:
                self._tell(call)
            yield
            if not first:
                self._tell(call)

    @contextmanager
    def _for_all_ranks(self, *harmless: type[Exception]) -> Iterator[None]:
        """Opens the scope of work that all ranks do: after an error in it, but for harmless ones, there is no more."""
        if self.failure is not None:
            raise self.failure
        with ExitStack() as scope:
            scope.push(partial(self._note_failure, harmless))
            yield

    def _note_failure(
        self,
        harmless: tuple[type[Exception], ...],
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raises PeerLost for an error of any kind that leaves the other ranks elsewhere, and keeps the first."""
        if error is None or isinstance(error, harmless):
            return
        if self.failure is None:
            failed = PeerLost(f"the rank that leads this replica failed, and tells no further call: {error!r}")
            self.failure = error if isinstance(error, PeerLost) else failed
            self.on_failure()
        if error is not self.failure:
            raise self.failure from error

    def _end_slice(self) -> None:
        if self._is_stepping:
            self._is_stepping = False
            self._announce(NO_STEP)

    def _announce(self, now: float) -> None:
        self._ranks.everyone.shared(torch.tensor([now], dtype=torch.float64), 0)
