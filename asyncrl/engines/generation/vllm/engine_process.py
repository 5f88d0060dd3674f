"""vLLM's AsyncLLM: makes it, asks it for tokens, and has it load weights. The only file of this process that imports
vLLM."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from asyncrl.errors import ConfigError, PeerLost, WeightsError

QUIET_ROUNDS = 10
"""Turns of the event loop without a token, after which all tokens of a paused engine have arrived: vLLM's answer to the
pause comes after them on the same socket, and each token then goes through three tasks."""

DEAD = "vLLM's processes have ended; the output of this worker (in logs of the run directory) has their last words"

T = TypeVar("T")


@dataclass(slots=True)
class Counters:
    """Counts what vLLM reports. cache_used: share of the cache that running requests own. preemptions: running requests
    so far whose keys and values were given up."""

    cache_used: float = 0.0
    preemptions: int = 0


def stat_logger(counters: Counters) -> Callable[..., StatLoggerBase]:
    """Returns what vLLM makes its logger of statistics with, which counts into `counters`."""

    class Logger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, *_: Any, **__: Any) -> None:
            """Takes no notice of what vLLM says about its configuration."""

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                counters.cache_used = float(scheduler_stats.kv_cache_usage)
            if iteration_stats is not None:
                counters.preemptions += int(iteration_stats.num_preempted_reqs)

        def log_engine_initialized(self) -> None:
            """Logs nothing."""

    return Logger


class EngineProcess:
    """AsyncLLM with the calls that the engine makes. sampled: number of tokens so far. Every call raises PeerLost when
    vLLM's processes are dead.

    allowed: ids that may be sampled, None: all. Raises ConfigError when vLLM refuses the model or an argument. Making
    it takes 10 seconds or more.
    """

    def __init__(self, arguments: Mapping[str, Any], allowed: Sequence[int] | None) -> None:
        self.sampled = 0
        self.counters = Counters()
        self._death: asyncio.Future[None] | None = None
        self._common = {
            "ignore_eos": True,
            "detokenize": False,
            "output_kind": RequestOutputKind.DELTA,
            "allowed_token_ids": None if allowed is None else list(allowed),
        }
        try:
            made = AsyncEngineArgs(**arguments)
            self._llm = AsyncLLM.from_engine_args(made, stat_loggers=[stat_logger(self.counters)])
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise ConfigError(
                f'generation.engine = "vllm" cannot run {arguments["model"]}: {error}\nThe output of this worker (in '
                "logs of the run directory) has what vLLM wrote about it"
            ) from error
        self._sentinels: list[int] = self._llm.engine_core.resources.engine_manager.sentinels()

    async def tokens(
        self, name: str, prompt: NDArray[np.int32], salt: str, **settings: Any
    ) -> AsyncGenerator[tuple[int, float]]:
        """Yields id and log-prob of each token of one sample as it is sampled. Ending the iteration ends the sample.
        name: unique among open requests. salt: prompts share keys and values only with those of the same salt.
        settings: of SamplingParams. Raises WeightsError when a log-prob is not finite."""
        params = SamplingParams(**self._common, logprobs=0, **settings)
        given = {"prompt_token_ids": prompt.tolist(), "cache_salt": salt}
        with death_is_peer_lost():
            async with aclosing(self._llm.generate(given, params, name)) as outputs:
                async for output in outputs:
                    sampled = output.outputs[0]
                    for token, logprobs in zip(sampled.token_ids, sampled.logprobs or (), strict=True):
                        self.sampled += 1
                        logprob = logprobs[token].logprob
                        if not np.isfinite(logprob):
                            raise WeightsError("vLLM's log-probs are not finite: the model's weights are damaged")
                        yield token, logprob

    async def logprobs_after(self, name: str, prompt: NDArray[np.int64], vocabulary: int) -> NDArray[np.float32]:
        """Returns the log-probs [vocabulary] of the token after a prompt at temperature 1, from a forward of all of the
        prompt."""
        params = SamplingParams(**self._common, max_tokens=1, logprobs=-1, skip_reading_prefix_cache=True)
        found = np.full(vocabulary, -np.inf, np.float32)
        with death_is_peer_lost():
            async with aclosing(self._llm.generate({"prompt_token_ids": prompt.tolist()}, params, name)) as outputs:
                async for output in outputs:
                    for token, logprob in (output.outputs[0].logprobs or [{}])[0].items():
                        if token < vocabulary:
                            found[token] = logprob.logprob
        return found

    async def pause(self) -> None:
        """Stops between two steps, with all requests kept, once all tokens that were sampled have been yielded."""
        await self._answer(self._llm.pause_generation(mode="keep", clear_cache=False))
        quiet = 0
        before = self.sampled
        while quiet < QUIET_ROUNDS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if self.sampled == before else 0
            before = self.sampled

    async def resume(self) -> None:
        await self._answer(self._llm.resume_generation())

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of WorkerExtension in every worker of vLLM; returns their answers. Raises PeerLost when the
        method fails in one: vLLM says so with an error of no class of its own."""
        call = await self._ended_call(self._llm.collective_rpc(method, args=arguments))
        if (error := call.exception()) is not None:
            raise PeerLost(f"{method} failed in a process of vLLM: {error}") from error
        answers: list[Any] = call.result()
        return answers

    async def drop_cache(self) -> None:
        """Drops all keys and values; running requests compute theirs again. Call it in a pause."""
        dropped = await self._answer(self._llm.reset_prefix_cache(reset_running_requests=True))
        assert dropped, "a paused engine holds no block back"

    async def watch(self) -> None:
        """Waits until vLLM's processes are dead, and raises PeerLost then."""
        await asyncio.wait([self._watched()])
        raise PeerLost(DEAD)

    def close(self) -> None:
        """Ends vLLM's processes."""
        if self._death is not None and not self._death.done():
            for sentinel in self._sentinels:
                self._death.get_loop().remove_reader(sentinel)
        self._llm.shutdown(timeout=0)

    async def _answer(self, call: Awaitable[T]) -> T:
        with death_is_peer_lost():
            return (await self._ended_call(call)).result()

    async def _ended_call(self, call: Awaitable[T]) -> "asyncio.Future[T]":
        """Waits for vLLM's answer to a call. Raises PeerLost when its processes die, after which vLLM would wait for
        the answer for ever."""
        answer = asyncio.ensure_future(call)
        first: list[asyncio.Future[Any]] = [answer, self._watched()]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise PeerLost(DEAD)
            return answer
        finally:
            answer.cancel()

    def _watched(self) -> "asyncio.Future[None]":
        """Returns what ends with the first of vLLM's processes, which are watched from the first call on."""
        if self._death is None:
            loop = asyncio.get_running_loop()
            self._death = loop.create_future()
            for sentinel in self._sentinels:
                loop.add_reader(sentinel, self._note_death, loop, self._death)
        return self._death

    def _note_death(self, loop: asyncio.AbstractEventLoop, death: "asyncio.Future[None]") -> None:
        death.set_result(None)
        for sentinel in self._sentinels:
            loop.remove_reader(sentinel)


@contextmanager
def death_is_peer_lost() -> Iterator[None]:
    """Raises PeerLost where vLLM says that its processes are dead."""
    try:
        yield
    except (EngineDeadError, EngineGenerateError) as error:
        raise PeerLost(DEAD) from error
