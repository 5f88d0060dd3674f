"""Generation by a replica of several ranks: one leads, and the others repeat its calls in the same order.

plain_request, ...     the calls of an engine as plain values
FollowingGeneration    a rank that follows, beside an event loop
LeadingEngine          the engine of the rank that leads
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.generation.block_pool import Ints
from asyncrl.engines.generation.engine_interface import NO_WEIGHTS, Completion, EngineLoad, Finish, Key, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.generation.torch_generation import RunsTorchEngine, load_engine
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.errors import ConfigError, DeadlineExceeded, PeerLost, Refused, WeightsError
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import SampleName
from asyncrl.protocols.messages import Published

# The calls of an engine, as plain values that travel from the rank that leads a replica to those that follow.
#
#     ("submit", 17.25, [request, ...])    name, the leader's clock in seconds, arguments
#
# A call has no array, so that it fits into one frame (lanes/control/message_codec.py).


Call: TypeAlias = tuple[Any, ...]
PLAIN = ("seed", "temperature", "max_new_tokens", "not_before", "deadline", "drawn", "may_go_on")
"""Fields of a request that are plain values already."""


def plain_request(request: SampleRequest) -> dict[str, Any]:
    """Returns a request as plain values. Raises ConfigError for a prompt with pictures."""
    if request.pictures is not None:
        raise ConfigError(
            "generation.layout: ranks that share out layers take no prompts with pictures; write { pp = 1, tp = 1 }"
        )
    prompt = request.prompt.astype(np.int32).tobytes()
    return {"key": list(request.key), "prompt": prompt} | {name: getattr(request, name) for name in PLAIN}


def request_of(plain: dict[str, Any]) -> SampleRequest:
    """Returns the request that these values describe."""
    group, member, attempt = plain["key"]
    read = SampleRequest((group, member, attempt), np.frombuffer(plain["prompt"], np.int32), 0, 0.0, 0)
    return replace(read, **{name: plain[name] for name in PLAIN})


NextCall = Callable[[], Awaitable[Call | None]]
"""Waits for the next call of the leader, as long as it is idle; None when the leader has ended. Raises PeerLost when it
is gone."""
NOTHING_NEW: Mapping[str, Tensor] = {}


# A rank that follows, beside an event loop: it repeats what the leader of its replica does, with weights of its own.
#
# leader      load(v) ── told ──┐             ┌── the next calls wait in their order
# this rank   update(v) ────────┴── load(v) ──┘   update returns
#             └── tensors of v, from the trainer's rank in this process


class FollowingEngine(TorchEngine):
    """A TorchEngine that applies what a LeadingEngine tells. Its clock stands where the leader's stood at the call, so
    that both find the same deadlines over. It has the same rows and blocks as the leader after each call.
    FollowingGeneration calls `apply`, on the compute thread."""

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
                self.end(map(_three, args[0]), args[1])
            case "forget":
                self.forget(map(_three, args[0]), args[1])
            case "load":
                self.load(weights, args[0], share=True)
            case "put_away":
                self.put_away()
            case "begin_again":
                self.begin_again()
            case _:
                assert name == "logprobs_after", f"the leader told {name!r}"
                self.logprobs_after(np.array(args[0], np.int64))

    def _step_with_leader(self) -> None:
        while not math.isnan(now := float(self._ranks.everyone.shared(torch.zeros(1, dtype=torch.float64), 0))):
            self._now = now
            self.step()


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
        self._steps_asked = 0  # Steps of the trainer in this process, before each of which all ranks put away.
        self._times_away = 0
        self._changed = asyncio.Condition()  # of the offer, or of the times away

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
        asked = self._steps_asked
        failed = "the leader of the replica did not put its weights away"
        await self._within(self._until(lambda: self._times_away >= asked), failed)

    async def update(self, published: Published) -> None:
        await self.load_own(published.version)

    async def load_own(self, version: int) -> None:
        """Returns when the leader has loaded a version, and this rank the same one, from the trainer's rank in this
        process. Raises Refused when that holds another one, or the leader goes on without this version, and
        DeadlineExceeded."""
        assert self._worker.handover is not None, "the trainer's rank is in this process"
        tensors = self._worker.handover.take(version)
        self._offer = offer = OfferedWeights(version, tensors, asyncio.get_running_loop().create_future())
        await self._tell_change()
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
                self._withdraw()
                await self._tell_change()

    def close(self) -> None:
        self._offer = None

    async def _load(self, call: Call) -> None:
        """Loads what the leader has loaded, as soon as this rank holds it."""
        version = call[2]
        is_offered = self._until(lambda: self._offer is not None and self._offer.version == version)
        await self._within(is_offered, f"the trainer's rank in this process gave no version {version}")
        offer = self._offer
        assert offer is not None, "it was offered"
        self._offer = None
        await self._worker.compute.run(self.core.apply, call, offer.tensors)
        if not offer.loaded.done():
            offer.loaded.set_result(None)

    async def _until(self, true: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(true)

    async def _tell_change(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _withdraw(self) -> None:
        """Ends the wait for a load that the leader has left out."""
        offer = self._offer
        self._offer = None
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


# The engine of the rank that leads a replica: it tells the other ranks each call, and what its clock says.
#
#     leader     submit ── told ──> step ── told ──> sums ... sums ── step ── sums ... ── slice ends ── load ── told
#                  │                  │                │                │                        │          │
#     follower   submit             steps <───────── exchanges of the group of ranks ───────────>              load
#
# All that changes the state of an engine has one place in one order, which is the leader's. A call that exchanges is
# told before it runs, so that the others meet it; every other call after it has succeeded. The steps of a slice are
# one call: each announces itself in the group, because a message for each would take as long as a small step. After
# an error the others may wait in an exchange that the next one would meet, so that none follows.


NO_STEP = math.nan
"""Announced in place of the clock where a slice ends."""
UNCHANGED = (Refused, WeightsError)
"""Errors of calls that have changed nothing yet, before they are told."""


class LeadingEngine(TorchEngine):
    """A TorchEngine whose calls the other ranks of its replica repeat. Steps stand in the scope of `slice`.

    ranks: of the replica, of which this is rank 0. tell: gives a call to all others, in this order, on the compute
    thread. Calls that exchange raise PeerLost when another rank is gone or late, and all calls once there is a failure.
    What changed this engine was told to all others in the same order; after a call that failed halfway none follows.
    TorchGeneration calls it, as any TorchEngine.
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
        with self._told("logprobs_after", prompt.tolist(), first=True):
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
