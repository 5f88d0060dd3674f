"""The edge between the generation service and what computes its samples."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation.scheduling.sample_requests import Completion, Key, SampleRequest
from asyncrl.engines.generation.tokenization import TokenizerWithStops, TurnRenderer
from asyncrl.protocols.batch import SampleName
from asyncrl.protocols.messages import Published


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Holds what an engine has to do. running, waiting: requests with and without slots. cache_used: share of the keys
    and values that fit. preemptions: running samples so far whose keys and values were given up for others.
    parked_hits, parked_misses: later turns so far that found the keys and values of the turn before, and others."""

    running: int
    waiting: int
    cache_used: float
    preemptions: int
    parked_hits: int
    parked_misses: int


class GenerationEngine(Protocol):
    """Samples requests while new weights arrive. All calls come from the event loop of one worker.

    tokenizer, turns: of the model. context: its context length in tokens, None if it has no limit. version: of the
    weights in use, NO_WEIGHTS before the first. A completion ends the stream of its request: it has every token with
    the log-prob and the version of the forward that sampled it.
    """

    @property
    def tokenizer(self) -> TokenizerWithStops: ...

    @property
    def turns(self) -> TurnRenderer: ...

    @property
    def context(self) -> int | None: ...

    @property
    def version(self) -> int: ...

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queues requests, which start in order of arrival once a slot is free and the weights are new enough. Raises
        ConfigError when prompt or completion does not fit into a slot."""

    def abort(self, keys: Iterable[Key]) -> None:
        """Ends these requests at the next step boundary, also in a pause; no completion of them is delivered."""

    def forget(self, samples: Iterable[SampleName], oldest: int) -> None:
        """Gives up the keys and values kept for later turns of these samples, and of groups before `oldest`."""

    def load(self) -> EngineLoad:
        """Reports what the engine has to do now."""

    async def pause(self) -> int:
        """Prevents further steps; returns a count of steps that stays the same while nothing is sampled."""

    async def resume(self) -> int:
        """Allows steps again; returns the count of steps."""

    async def update(self, published: Published) -> None:
        """Uses these weights from a step boundary on, while running samples go on. The old weights sample until then,
        and when the new ones are refused with WeightsError or PeerLost; an engine that cannot go on ends `run`."""

    async def logprobs_after(self, prompt: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the log-probs [vocabulary] of the token after a prompt at temperature 1."""

    async def run(self, deliver: Callable[[Sequence[Completion]], None]) -> None:
        """Samples until cancelled, and delivers what finishes. An error means that the engine is dead."""

    def close(self) -> None:
        """Frees what the engine holds, after `run` has ended or without it."""
