"""Computes log-probs of a frozen model with the code of the trainer."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.gate_config import GateConfig
from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.models.row_length import refuse_rotation_by_longest_row
from asyncrl.engines.pictures.prompt_pictures import PromptPictures
from asyncrl.engines.training.batch.micro_batches import experts_of, spans_of, token_ids
from asyncrl.engines.training.batch.train_rows import token_columns
from asyncrl.engines.training.models_with_heads import CausalModel, load_causal_model
from asyncrl.engines.training.token_logprobs import frozen_logprobs
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.lanes.data.row_store import bytes_of_row
from asyncrl.protocols.batch import Batch, BatchRef
from asyncrl.protocols.row_columns import EXPERTS, reference_columns
from asyncrl.protocols.service_contracts import Reference
from asyncrl.services.ranks.forward_passes import results_of_forward_passes

COLUMN = "reference_logprobs"


class ReferenceService(Service, Reference):
    """Stores one row per sample: `reference_logprobs` float32 [sampled tokens]."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._model: CausalModel

    async def start(self) -> None:
        """Loads the initial model of the run, and opens rows for every sample that can be in flight."""
        config = self.context.config
        row_bytes = bytes_of_row(reference_columns(config.response_tokens))
        self.rows = self.context.open_rows(GateConfig.of(config).row_slots, row_bytes)
        self._model = await self.context.compute.run(self._load)

    async def logprobs(self, samples: BatchRef) -> BatchRef:
        logprobs = await results_of_forward_passes(self.context, samples, self._forward, self._columns(), see=True)
        places = [self.keep(row.name, {COLUMN: own}) for row, own in zip(samples, logprobs, strict=True)]
        self.add_to_counters(samples=len(places), tokens=sum(map(len, logprobs)))
        return samples.with_places(places)

    def _columns(self) -> list[str]:
        """Returns the columns that log-probs are computed from."""
        config = self.context.config
        return [*token_columns(config), *([EXPERTS] if config.reference.router_replay else [])]

    def _load(self) -> CausalModel:
        config, device = self.context.config, self.context.config.reference.device
        refuse_unusable("reference.device", device)
        refuse_rotation_by_longest_row(self.context.facts.model_dir, config)
        precision, exact = config.training.precision, config.model.float32_head
        replay = config.reference.router_replay
        return load_causal_model(self.context.facts.model_dir, device, precision, float32_head=exact, replay=replay)

    def _forward(self, rows: Batch, pictures: Sequence[PromptPictures | None]) -> list[NDArray[np.float32]]:
        config = self.context.config
        temperatures = [config.generation.temperature] * len(rows)
        chunk, budget = config.training.logits_chunk, config.training.micro_batch_tokens
        spans, experts = spans_of(rows), experts_of(rows)
        return frozen_logprobs(self._model, *token_ids(rows), temperatures, chunk, spans, budget, experts, pictures)
