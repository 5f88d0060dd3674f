"""Computes log-probs of a frozen model with the code of the trainer."""

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.gate_config import GateConfig
from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.training.batch.micro_batches import forward_passes, token_ids
from asyncrl.engines.training.models_with_heads import CausalModel, load_causal_model
from asyncrl.engines.training.token_logprobs import frozen_logprobs
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.lanes.data.row_store import bytes_of_slot
from asyncrl.protocols.batch import Batch, BatchRef
from asyncrl.protocols.contracts import Reference

COLUMN = "reference_logprobs"


class ReferenceService(Service, Reference):
    """Stores one row per sample: `reference_logprobs` float32 [tokens].

    With `generation.deterministic`, each row has a forward pass of its own, so that its bits do not depend on others.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._model: CausalModel

    async def start(self) -> None:
        """Loads the initial model of the run, and reserves memory for every sample that can be in flight."""
        config = self.context.config
        slot_bytes = bytes_of_slot({COLUMN: (np.dtype(np.float32), config.generation.max_new_tokens)})
        self.rows = self.context.open_rows(GateConfig.of(config).row_slots, slot_bytes)
        self._model = await self.context.compute.run(self._load)

    async def logprobs(self, samples: BatchRef) -> BatchRef:
        rows = await self.context.reader.read(samples, ["prompt_ids", "response_ids"])
        logprobs: dict[int, NDArray[np.float32]] = {}
        for part in forward_passes(rows, self.context.config):
            values = await self.context.compute.run(self._forward, rows.take(part))
            logprobs.update(zip(part, values, strict=True))
        places = [self.keep(row.name, {COLUMN: logprobs[number]}) for number, row in enumerate(samples)]
        return samples.with_places(places)

    def _load(self) -> CausalModel:
        """Loads the model; runs on the compute thread."""
        config = self.context.config
        refuse_unusable("reference.device", config.reference.device)
        folder, device = self.context.model_dir, config.reference.device
        return load_causal_model(folder, device, config.training.precision, float32_head=config.model.float32_head)

    def _forward(self, rows: Batch) -> list[NDArray[np.float32]]:
        """Runs one forward pass on the compute thread."""
        config = self.context.config
        temperatures = [config.generation.temperature] * len(rows)
        prompts, responses = token_ids(rows)
        return frozen_logprobs(self._model, prompts, responses, temperatures, config.training.logits_chunk)
