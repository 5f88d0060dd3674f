"""What a generation engine takes, gives and does. Everything here runs on one thread: the worker's compute thread."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.weights.spec import WeightsSpec

Key = tuple[int, int, int]  # group, member, attempt
Finish = Literal["stop", "stop_string", "length", "abort"]
NO_WEIGHTS = -1  # version of an engine that has not been given any: it starts no sequence


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One sample to draw.

    prompt: int32 [prompt tokens]; members that share the array share its forward. seed: the member's; draw i of the
    sample is `draws(seed, i)`. temperature: 0 takes the likeliest token. not_before: no older weights may start it.
    """

    key: Key
    prompt: NDArray[np.int32]
    seed: int
    temperature: float
    max_new_tokens: int
    not_before: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One finished sample; all arrays are [sampled tokens], a sampled end-of-sequence token included.

    logprobs: float32, log-softmax(logits / temperature) over the whole vocabulary of the very forward that sampled (at
    temperature 0 that of temperature 1: such samples never enter a loss). versions: of the weights that sampled each
    token. text: decoded without special tokens, cut before a stop string.
    """

    request: Request
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: Finish
    text: str


class GenerationEngine(Protocol):
    """Continuous batching: `submit` any time, `step` until nothing is `active`."""

    @property
    def version(self) -> int:
        """Of the weights in use; NO_WEIGHTS before the first."""
        ...

    @property
    def active(self) -> bool:
        """Whether `step` would sample something now."""
        ...

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        ...

    @property
    def running(self) -> int:
        """Requests in a slot."""
        ...

    @property
    def spec(self) -> WeightsSpec:
        """Names, shapes and dtype of the weights that `load` takes."""
        ...

    @property
    def context(self) -> int | None:
        """Positions that the model was made for; None: without bound."""
        ...

    @property
    def token_bytes(self) -> int:
        """Bytes of UTF-8 that one token can decode to."""
        ...

    def tokenize(self, prompt: str | list[dict[str, Any]]) -> NDArray[np.int32]:
        """Token ids of a prompt: text as the tokenizer takes it, chat messages by the chat template."""
        ...

    def decode(self, tokens: NDArray[np.int32]) -> str:
        """Text of tokens, special ones left out."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request; it starts in the order of arrival when a slot is free and the weights are new enough.

        Raises:
            ConfigError: prompt and completion do not fit a slot.
        """
        ...

    def step(self) -> list[Completion]:
        """Sample one token of every running request; what finished."""
        ...

    def end(self, keys: Iterable[Key], finish: Finish) -> list[Completion]:
        """End requests now; those that had begun are answered, those that had not are forgotten."""
        ...

    def logprobs_after(self, prompt: NDArray[np.int64]) -> NDArray[np.float32]:
        """[vocabulary]: of the token that follows, by the weights in use at temperature 1; what runs is not touched."""
        ...

    def load(self, tensors: Mapping[str, Tensor], version: int, *, share: bool) -> None:
        """Use these weights from the next step on; running sequences go on. share: keep the tensors, do not copy."""
        ...
