"""The samples that a generation engine is asked for, and those that it returns."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import Config
from asyncrl.engines.models.model_folder import longest_row
from asyncrl.engines.pictures.prompt_pictures import PromptPictures
from asyncrl.errors import ConfigError
from asyncrl.protocols.batch import CUT, LATE

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
