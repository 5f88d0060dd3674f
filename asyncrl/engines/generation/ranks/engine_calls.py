"""The calls of an engine, as plain values that travel from the rank that leads a replica to those that follow.

    ("submit", 17.25, [request, ...])    name, the leader's clock in seconds, arguments

A call has no array, so that it fits into one frame (lanes/control/message_codec.py).
"""

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from asyncrl.engines.generation.scheduling.block_pool import Ints
from asyncrl.engines.generation.scheduling.sample_requests import SampleRequest
from asyncrl.errors import ConfigError

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


def plain_tokens(tokens: Ints) -> bytes:
    return tokens.astype(np.int64).tobytes()


def tokens_of(plain: bytes) -> Ints:
    return np.frombuffer(plain, np.int64)
