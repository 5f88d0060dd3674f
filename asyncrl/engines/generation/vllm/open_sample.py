"""A request that vLLM samples: the tokens so far, and when the sample ends."""

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation.scheduling.sample_requests import Completion, Finish, SampleRequest
from asyncrl.engines.generation.tokenization import TokenizerWithStops
from asyncrl.protocols.seeds import GAMMA


class OpenSample:
    """Takes tokens as they arrive and says when the sample has ended: after an end-of-sequence token, a stop string,
    the last token that was asked for, or the first token after the deadline. ends_at: in seconds of the clock that
    `add` is told. What arrives later is not part of the sample."""

    def __init__(self, request: SampleRequest, ends_at: float) -> None:
        self.request = request
        self._ends_at = ends_at
        self._sampled = 0
        self._tokens = np.zeros(request.max_new_tokens, np.int32)
        self._logprobs = np.zeros(request.max_new_tokens, np.float32)
        self._versions = np.zeros(request.max_new_tokens, np.int32)

    def add(self, token: int, logprob: float, version: int) -> None:
        self._tokens[self._sampled] = token
        self._logprobs[self._sampled] = logprob
        self._versions[self._sampled] = version
        self._sampled += 1

    def finish(self, tokenizer: TokenizerWithStops, end_ids: NDArray[np.int64], now: float) -> Finish | None:
        """Returns why the sample has ended with its newest token, or None while it goes on."""
        if self._tokens[self._sampled - 1] in end_ids:
            return "stop"
        if tokenizer.stops(self._tokens[: self._sampled]):
            return "stop_string"
        if self._sampled >= self.request.max_new_tokens or now >= self._ends_at:
            return "length"
        return None

    def completion(self, finish: Finish, tokenizer: TokenizerWithStops) -> Completion:
        """Returns a copy of what was recorded."""
        tokens = self._tokens[: self._sampled].copy()
        text = tokenizer.before_stop(tokens) if finish == "stop_string" else tokenizer.decode(tokens)
        logprobs, versions = self._logprobs[: self._sampled].copy(), self._versions[: self._sampled].copy()
        return Completion(self.request, tokens, logprobs, versions, finish, text)


def sampling_seed(request: SampleRequest) -> int:
    """Returns the seed of vLLM's random numbers for a turn, 63 bits: that of the member, another one in later turns,
    which would draw the numbers of the first turn again."""
    return (request.seed + request.drawn * int(GAMMA)) % 2**63
