"""Engines of tiny models and what they are asked for, and what transformers' own forward computes of their samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from asyncrl.engines.generation.engine_interface import Completion, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from tests.unit.engines.generation.conftest import engine_config

KNOWN = 261
"""Ids of the tokenizer."""


@torch.no_grad()
def plain_logprobs(
    model: Any, done: Completion, weights: Mapping[str, Tensor] = MappingProxyType({}), known: int | None = KNOWN
) -> np.ndarray:
    """Log-probs of the tokens of a sample by the model's own forward over the whole sequence. weights: in place of its
    own. known: ids that may be sampled."""
    begin = len(done.request.prompt)
    ids = torch.from_numpy(np.concatenate([done.request.prompt, done.tokens]).astype(np.int64))
    found = functional_call(model, dict(weights), (), {"input_ids": ids[None], "use_cache": False})
    every = (found.logits[0, begin - 1 : -1, :known] / (done.request.temperature or 1.0)).log_softmax(-1)
    logprobs: np.ndarray = every.gather(-1, ids[begin:, None])[:, 0].numpy()
    return logprobs


class Lab:
    """Engines of tiny models, and what transformers' own forward computes of their samples."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self.folder = folder
        self._models: dict[str, Any] = {}

    def engine(self, family: str = "llama", version: int = 0, **settings: Any) -> TorchEngine:
        shape = {"slots": 5, "max_prompt_tokens": 40, "max_new_tokens": 24} | settings
        return TorchEngine(self.folder(family), engine_config(**shape), version)

    def model(self, family: str = "llama") -> Any:
        """The model of a family, which nobody changes."""
        if family not in self._models:
            self._models[family] = AutoModelForCausalLM.from_pretrained(self.folder(family), dtype=torch.float32)
        return self._models[family]

    def weights(self, family: str = "llama", seed: int | None = 1) -> dict[str, Tensor]:
        """The parameters of a family, moved by a few per cent, or without a seed as they are; tied names share a
        tensor."""
        torch.manual_seed(seed or 0)
        found: dict[int, Tensor] = {}
        for each in self.model(family).parameters():
            moved = 0.0 if seed is None else 0.05 * each.detach().std().nan_to_num(0.0)
            found[id(each)] = each.detach() + moved * torch.randn_like(each)
        named = self.model(family).named_parameters(remove_duplicate=False)
        return {name: found[id(each)] for name, each in named}

    def plain(self, done: Completion, family: str = "llama", **given: Any) -> np.ndarray:
        return plain_logprobs(self.model(family), done, **given)

    def check(self, done: Mapping[Any, Completion], family: str = "llama", **given: Any) -> None:
        """What was recorded of these samples is what the model's own forward computes."""
        assert done
        for each in done.values():
            np.testing.assert_allclose(each.logprobs, self.plain(each, family, **given), atol=1e-5, rtol=0)


def requests(count: int, seed: int = 0, temperature: float = 1.0, **changes: Any) -> list[SampleRequest]:
    """Ragged prompts and lengths."""
    random = np.random.default_rng(seed)
    return [
        SampleRequest(
            key=(number, 0, 0),
            prompt=random.integers(5, KNOWN, random.integers(1, 40)).astype(np.int32),
            seed=int(random.integers(1 << 62)),
            temperature=temperature,
            **({"max_new_tokens": int(random.integers(1, 25))} | changes),
        )
        for number in range(count)
    ]


def group_of(members: int, length: int, tokens: int) -> list[SampleRequest]:
    """The members of one group, with one prompt between them."""
    prompt = np.random.default_rng(length).integers(5, KNOWN, length).astype(np.int32)
    return [SampleRequest((0, member, 0), prompt, 100 + member, 1.0, tokens) for member in range(members)]


def going_on(done: Completion, tokens: int, given: Sequence[int] = (), **changes: Any) -> SampleRequest:
    """The next turn of a sample, to which these tokens were given."""
    prompt = np.concatenate([done.request.prompt, done.tokens, np.array(given, np.int32)])
    drawn = done.request.drawn + len(done.tokens)
    return replace(done.request, prompt=prompt, drawn=drawn, max_new_tokens=tokens, **changes)


def drain(
    engine: TorchEngine, wanted: Sequence[SampleRequest] = (), between: Callable[[int], None] = lambda step: None
) -> dict[Any, Completion]:
    """Submits, and steps until nothing is active; returns completions by key. between: gets the number of each step."""
    engine.submit(*wanted)
    done: dict[Any, Completion] = {}
    for step in count(1):
        if not engine.active:
            return done
        done |= {each.request.key: each for each in engine.step()}
        between(step)
    raise AssertionError


def at(step: int, change: Callable[[], object]) -> Callable[[int], None]:
    """Makes a change after one step."""
    return lambda number: change() if number == step else None  # type: ignore[return-value]


def same(left: Completion, right: Completion) -> bool:
    """Whether two samples have the same bits."""
    return np.array_equal(left.tokens, right.tokens) and left.logprobs.tobytes() == right.logprobs.tobytes()
