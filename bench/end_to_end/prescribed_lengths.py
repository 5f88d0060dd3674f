"""Samples completions of prescribed lengths, so that all compared systems sample the same numbers of tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.engines.generation.sample_requests import NO_WEIGHTS, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.protocols.messages import PromptGroup
from asyncrl.services.generation import GenerationService


class EndlessEngine(TorchEngine):
    """Ignores end tokens, so that every completion has its requested length."""

    def __init__(self, folder: Path, config: Config, version: int = NO_WEIGHTS) -> None:
        super().__init__(folder, config, version)
        self._end_ids = np.zeros(0, np.int64)


class PrescribedLengths(GenerationService):
    """Samples completions of the option `lengths`: tokens of each sample of a batch, the same for every batch."""

    def _requests(self, prompts: PromptGroup) -> list[SampleRequest]:
        task, lengths = self.context.config.task, self.context.spec.options["lengths"]
        first = (prompts.id % task.prompts_per_step) * task.samples_per_prompt
        return [
            replace(request, max_new_tokens=lengths[first + member])
            for request, member in zip(super()._requests(prompts), prompts.members, strict=True)
        ]

    def _load_engine(self) -> EndlessEngine:
        version = self.context.spec.options.get("own_version", NO_WEIGHTS)
        return EndlessEngine(self.context.facts.model_dir, self.context.config, version)
