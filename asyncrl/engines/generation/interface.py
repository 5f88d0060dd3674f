"""The interface of a generation engine. All calls run on one thread, the compute thread of the worker."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.generation.tokenization import TokenizerWithStops
from asyncrl.lanes.weights.tensor_spec import WeightsSpec

Key = tuple[int, int, int]  # group, member, attempt
Finish = Literal["stop", "stop_string", "length", "abort"]
NO_WEIGHTS = -1  # version of an engine before its first weights; the engine then starts no request


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """Asks for one sample.

    prompt: int32 [prompt tokens]; requests that share the array share its prefill. seed: of the member; draw i of the
    sample is `draws(seed, i)`. temperature: 0 takes the likeliest token. not_before: oldest weight version that may
    start the sample.
    """

    key: Key
    prompt: NDArray[np.int32]
    seed: int
    temperature: float
    max_new_tokens: int
    not_before: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Holds one finished sample. All arrays are [sampled tokens], including a sampled end-of-sequence token.

    logprobs: float32, log-softmax(logits / temperature) over the whole vocabulary, from the forward that sampled; for
    temperature 0, whose samples never enter a loss, at temperature 1. versions: weight version that sampled each token.
    text: decoded without special tokens and cut before a stop string.
    """

    request: SampleRequest
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: Finish
    text: str


class GenerationEngine(Protocol):
    """Samples with continuous batching: `submit` at any time, and call `step` while the engine is `active`.

    version: of the weights in use, NO_WEIGHTS before the first. spec: names, shapes and dtype of weights for `load`.
    context: context length of the model in tokens, None if it has no limit. active: whether `step` would sample a token
    now. waiting, running: requests without and with a slot.
    """

    version: int
    spec: WeightsSpec
    context: int | None
    tokenizer: TokenizerWithStops

    @property
    def active(self) -> bool: ...

    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...

    def submit(self, request: SampleRequest) -> None:
        """Queues a request. Requests start in order of arrival once a slot is free and the weights are new enough.

        Raises ConfigError when prompt or completion does not fit into a slot.
        """

    def step(self) -> list[Completion]:
        """Samples one token of every running request; returns the requests that finished."""
        ...

    def end(self, keys: Iterable[Key], finish: Finish) -> list[Completion]:
        """Ends requests now. Returns those that were running; requests that were waiting are removed."""
        ...

    def logprobs_after(self, prompt: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the log-probs [vocabulary] of the token after a prompt at temperature 1."""
        ...

    def load(self, tensors: Mapping[str, Tensor], version: int, *, share: bool) -> None:
        """Uses these weights from the next step on; running requests continue.

        share: keep the tensors themselves, of the same device and dtype, which must not be written while in use.

        Raises WeightsError when a parameter is missing or tied names come with different values.
        """
