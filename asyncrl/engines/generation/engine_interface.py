"""The edge between the generation service and what computes its samples: requests, completions, and an engine's
calls."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import Config
from asyncrl.engines.generation.tokenization import TokenizerWithStops, TurnRenderer
from asyncrl.engines.models.model_folder import longest_row
from asyncrl.engines.models.prompt_pictures import PromptPictures
from asyncrl.errors import ConfigError
from asyncrl.protocols.batch import CUT, LATE, SampleName
from asyncrl.protocols.messages import Published

# The samples that a generation engine is asked for, and those that it returns.


Key = tuple[int, int, int]  # group, member, attempt
Finish = Literal["stop", "stop_string", "length", "abort"]
NO_WEIGHTS = -1  # version of an engine before its first weights; the engine then starts no request


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """Asks for one sample, or for the next turn of one.

    prompt: int32 [tokens]; in a later turn everything that came before, sampled and given. Requests that share the
    array share its prefill. seed: of the member; draw i of the sample is `draws(seed, i)`. temperature: 0 takes the
    likeliest token. not_before: oldest weight version that may start the turn. deadline: seconds in a slot after which
    the turn ends as `length`; waiting for a slot is free, and so is waiting for KV blocks after a preemption. drawn:
    tokens sampled in earlier turns. may_go_on: whether another turn may follow, for which keys and values are kept.
    pictures: of the prompt. opened: whether the prompt ends inside thoughts.
    """

    key: Key
    prompt: NDArray[np.int32]
    seed: int
    temperature: float
    max_new_tokens: int
    not_before: int = 0
    deadline: float = math.inf
    drawn: int = 0
    may_go_on: bool = False
    pictures: PromptPictures | None = None
    opened: bool = False

    @property
    def prompt_key(self) -> bytes:
        """Returns what requests with the same keys and values of their prompts have in common: the tokens, and the
        pictures, because all pictures of one size have the same tokens."""
        return self.prompt.tobytes() + (b"" if self.pictures is None else self.pictures.pictures.digest)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Holds one finished sample, or turn. All arrays are [sampled tokens], including a sampled end-of-sequence token.

    logprobs: float32, log-softmax(logits / temperature) over the tokens that may be sampled, from the forward that
    sampled; for temperature 0, whose samples never enter a loss, at temperature 1. versions: weight version that
    sampled each token. text: decoded without special tokens, but with those that mark thoughts, and cut before a stop
    string. experts: [prompt and sampled tokens, routers x k], where they are recorded.
    """

    request: SampleRequest
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: Finish
    text: str
    experts: NDArray[Any] | None = None

    def unfinished_by(self, most: int) -> str:
        """Returns CUT for an answer of `most` tokens, generation.max_new_tokens, that goes on, LATE for one that its
        deadline ended; "" where it came to its end, or to that of the tokens of its episode."""
        if self.finish != "length":
            return ""
        return CUT if len(self.tokens) == most else LATE if len(self.tokens) < self.request.max_new_tokens else ""


def refuse_too_long(requests: Iterable[SampleRequest], config: Config) -> None:
    """Raises ConfigError when the prompt or the completion of a request has more tokens than the config allows."""
    answer = config.generation.max_new_tokens
    prompt = config.task.max_prompt_tokens
    longest = longest_row(config)
    for request in requests:
        asked = {"generation.max_new_tokens": (request.max_new_tokens, answer)}
        if request.drawn:
            whole = len(request.prompt) + request.max_new_tokens
            asked["task.max_prompt_tokens + environment.max_tokens"] = (whole, longest)
        else:
            asked["task.max_prompt_tokens"] = (len(request.prompt), prompt)
        for key, (found, most) in asked.items():
            if not 0 < found <= most:
                raise ConfigError(f"group {request.key[0]} asks for {found} tokens where {key} is {most}")


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
