"""An engine that answers with the samples of a file instead of sampling (`generation.stored_samples`)."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.engines.generation.scheduling.sample_requests import (
    NO_WEIGHTS,
    Completion,
    Finish,
    Key,
    SampleRequest,
    refuse_too_long,
)
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.errors import ConfigError
from asyncrl.tasks.stored_samples import read_stored_samples

CHECKED_PROMPTS = 32
"""Prompts of which a sample is decoded, to find tokens of another tokenizer."""


class StoredSampleEngine(TorchEngine):
    """Completes each request at once with a stored sample: its tokens, the log-probs of the policy that sampled them,
    and the version of the weights now in use, since versions of another run say nothing about this one. The model takes
    over weights as ever, for the canary and for evaluations elsewhere.

    Raises TaskError for a file that cannot be trained, and ConfigError for tokens of another tokenizer.
    """

    def __init__(self, folder: Path, config: Config, version: int = NO_WEIGHTS) -> None:
        super().__init__(folder, config, version)
        self._stored = read_stored_samples(Path(config.generation.stored_samples), config.task.samples_per_prompt)
        checked = self._stored.some(CHECKED_PROMPTS)
        if any(not self.tokenizer.decode(sample.tokens).startswith(sample.text) for sample in checked):
            path = self._stored.path
            model = config.model.name
            raise ConfigError(f"generation.stored_samples: {path} has tokens of another tokenizer than {model}")
        self._asked: deque[SampleRequest] = deque()

    @property
    def waiting(self) -> int:
        return len(self._asked)

    @property
    def active(self) -> bool:
        return any(self._may_start(request) for request in self._asked)

    def submit(self, *requests: SampleRequest) -> None:
        refuse_too_long(requests, self._config)
        for request in requests:
            self._stored.check(request.prompt)
        self._asked.extend(requests)

    def step(self) -> list[Completion]:
        ready = [request for request in self._asked if self._may_start(request)]
        self._asked = deque(request for request in self._asked if not self._may_start(request))
        return [self._completion(request) for request in ready]

    def begin_again(self) -> None:
        self._asked.clear()
        super().begin_again()

    def end(self, keys: Iterable[Key], finish: Finish) -> list[Completion]:
        if wanted := set(keys):
            self._asked = deque(request for request in self._asked if request.key not in wanted)
        return []

    def _completion(self, request: SampleRequest) -> Completion:
        group, member, _ = request.key
        stored = self._stored.sample(request.prompt, group, member)
        versions = np.full(len(stored.tokens), self.version, np.int32)
        finish = cast(Finish, stored.finish)
        asked = replace(request, prompt=stored.prompt, max_new_tokens=len(stored.tokens))
        return Completion(asked, stored.tokens, stored.logprobs, versions, finish, stored.text)
