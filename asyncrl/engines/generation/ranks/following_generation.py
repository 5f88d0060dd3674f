"""A rank that follows, beside an event loop: it repeats what the leader of its replica does, with weights of its own.

leader      load(v) ── told ──┐             ┌── the next calls wait in their order
this rank   update(v) ────────┴── load(v) ──┘   update returns
            └── tensors of v, from the trainer's rank in this process
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.generation.engine_interface import EngineLoad
from asyncrl.engines.generation.ranks.engine_calls import Call, request_of, tokens_of
from asyncrl.engines.generation.scheduling.sample_requests import NO_WEIGHTS, Completion, Key, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.generation.torch_generation import RunsTorchEngine, load_engine
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.errors import DeadlineExceeded, Refused
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import SampleName
from asyncrl.protocols.messages import Published

NextCall = Callable[[], Awaitable[Call | None]]
"""Waits for the next call of the leader, as long as it is idle; None when the leader has ended. Raises PeerLost when it
is gone."""
NOTHING_NEW: Mapping[str, Tensor] = {}


class FollowingEngine(TorchEngine):
    """A TorchEngine that applies what a LeadingEngine tells. Its clock stands where the leader's stood at the call, so
    that both find the same deadlines over."""

    def __init__(self, folder: Path, config: Config, version: int = NO_WEIGHTS, *, ranks: RankMesh) -> None:
        super().__init__(folder, config, version, ranks)
        self._now = 0.0
        self._batch.clock = lambda: self._now

    def apply(self, call: Call, weights: Mapping[str, Tensor] = NOTHING_NEW) -> None:
        """Repeats a call; all steps of a slice are one. weights: of the version that a call loads, which the engine
        keeps. Raises PeerLost when another rank is gone or late."""
        name, self._now, *args = call
        match name:
            case "step":
                self._step_with_leader()
            case "submit":
                self.submit(*map(request_of, args[0]))
            case "end":
                self.end([_three(key) for key in args[0]], args[1])
            case "forget":
                self.forget([_three(sample) for sample in args[0]], args[1])
            case "load":
                self.load(weights, args[0], share=True)
            case "put_away":
                self.put_away()
            case "begin_again":
                self.begin_again()
            case _:
                assert name == "logprobs_after", f"the leader told {name!r}"
                self.logprobs_after(tokens_of(args[0]))

    def _step_with_leader(self) -> None:
        while not math.isnan(now := self._announced()):
            self._now = now
            self.step()

    def _announced(self) -> float:
        return float(self._ranks.everyone.shared(torch.zeros(1, dtype=torch.float64), 0))


def _three(numbers: list[Any]) -> tuple[int, int, int]:
    first, second, third = numbers
    return first, second, third


@dataclass(frozen=True, slots=True, eq=False)
class OfferedWeights:
    """Holds weights until the leader loads the same version. loaded: resolves then."""

    version: int
    tensors: Mapping[str, Tensor]
    loaded: asyncio.Future[None]


class FollowingGeneration(RunsTorchEngine):
    """Runs a FollowingEngine, `core`, on the compute thread of a worker. It takes no requests. timeout: seconds that
    this rank and the leader wait for each other where weights are loaded or put away."""

    core: FollowingEngine

    def __init__(self, core: FollowingEngine, worker: WorkerContext, calls: NextCall, timeout: float) -> None:
        self.core = core
        self._worker = worker
        self._calls = calls
        self._timeout = timeout
        self._offer: OfferedWeights | None = None
        self._is_offered = asyncio.Event()
        self._steps_asked = 0  # Steps of the trainer in this process, before each of which all ranks put away.
        self._times_away = 0
        self._went_away = asyncio.Event()

    @classmethod
    async def open(
        cls, worker: WorkerContext, *, ranks: RankMesh, calls: NextCall, timeout: float
    ) -> "FollowingGeneration":
        """Loads what this rank has of the layers on the compute thread. Raises ConfigError for a model or device that
        cannot be used."""
        return cls(await load_engine(worker, partial(FollowingEngine, ranks=ranks)), worker, calls, timeout)

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Raises Refused: requests go to the leader."""
        raise Refused(f"{self._worker.spec.instance} follows the leader of its replica: ask that one for samples")

    def abort(self, keys: Iterable[Key]) -> None:
        """Does nothing: the leader ends samples."""

    def forget(self, samples: Iterable[SampleName], oldest: int) -> None:
        """Does nothing: the leader gives up keys and values."""

    def load(self) -> EngineLoad:
        """Reports nothing: the leader counts the samples of the replica."""
        return EngineLoad(0, 0, 0.0, 0, 0, 0)

    async def pause(self) -> int:
        return 0

    async def resume(self) -> int:
        return 0

    async def put_away(self) -> None:
        """Returns when the leader has put its weights away as often as it is asked for here, and this rank too. Raises
        DeadlineExceeded."""
        self._steps_asked += 1
        await self._within(self._away(self._steps_asked), "the leader of the replica did not put its weights away")

    async def update(self, published: Published) -> None:
        await self.load_own(published.version)

    async def load_own(self, version: int) -> None:
        """Returns when the leader has loaded a version, and this rank the same one, from the trainer's rank in this
        process. Raises Refused when that holds another one, or the leader goes on without this version, and
        DeadlineExceeded."""
        assert self._worker.handover is not None, "the trainer's rank is in this process"
        tensors = self._worker.handover.take(version)
        self._offer = offer = OfferedWeights(version, tensors, asyncio.get_running_loop().create_future())
        self._is_offered.set()
        await self._within(offer.loaded, f"the leader of the replica did not load version {version}")

    async def logprobs_after(self, prompt: NDArray[np.int64]) -> NDArray[np.float32]:
        """Raises Refused: the leader is asked, and this rank computes with it."""
        raise Refused(f"{self._worker.spec.instance} follows the leader of its replica: ask that one for log-probs")

    async def run(self, deliver: Callable[[Sequence[Completion]], None]) -> None:
        """Repeats the calls of the leader until it ends, or until cancelled. Raises PeerLost when it is gone."""
        while (call := await self._calls()) is not None:
            name = call[0]
            if name == "load":
                await self._load(call)
                continue
            await self._worker.compute.run(self.core.apply, call)
            if name == "put_away":
                self._times_away += 1
                self._went_away.set()
                self._withdraw()

    def close(self) -> None:
        self._offer = None

    async def _load(self, call: Call) -> None:
        """Loads what the leader has loaded, as soon as this rank holds it."""
        version = call[2]
        while self._offer is None or self._offer.version != version:
            self._is_offered.clear()
            await self._within(self._is_offered.wait(), f"the trainer's rank in this process gave no version {version}")
        offer, self._offer = self._offer, None
        await self._worker.compute.run(self.core.apply, call, offer.tensors)
        if not offer.loaded.done():
            offer.loaded.set_result(None)

    async def _away(self, times: int) -> None:
        while self._times_away < times:
            self._went_away.clear()
            await self._went_away.wait()

    def _withdraw(self) -> None:
        """Ends the wait for a load that the leader has left out."""
        offer, self._offer = self._offer, None
        if offer is not None and not offer.loaded.done():
            offer.loaded.set_exception(
                Refused(f"the leader of the replica put its weights away and did not load version {offer.version}")
            )

    async def _within(self, wait: Awaitable[object], failed: str) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await wait
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{failed} within {self._timeout:g} s ({self._worker.spec.instance}); look for the error of the other "
                "rank"
            ) from error
