"""Log-probs of a frozen model, by the trainer's own code."""

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.training.logprobs import frozen_logprobs
from asyncrl.engines.training.model import CausalModel, load_causal_model
from asyncrl.engines.training.rows import forward_passes, token_ids
from asyncrl.groups import GateConfig
from asyncrl.protocols.batch import Batch, BatchRef
from asyncrl.protocols.contracts import Reference
from asyncrl.rows import bytes_of_slot
from asyncrl.service import Service, WorkerContext

COLUMN = "reference_logprobs"


class ReferenceService(Service, Reference):
    """Stores one row a sample: `reference_logprobs` float32 [tokens].

    With `generation.deterministic` each row has a forward pass of its own, so that its bits depend on nothing else.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._model: CausalModel

    async def start(self) -> None:
        """Load the model that the run began with, and take memory for every sample that can be in flight."""
        config = self.context.config
        longest = bytes_of_slot({COLUMN: (np.dtype(np.float32), config.generation.max_new_tokens)})
        self.rows = self.context.open_rows(GateConfig.of(config).row_slots, longest)
        self._model = await self.context.compute.run(self._load)

    async def logprobs(self, samples: BatchRef) -> BatchRef:
        rows = await self.context.reader.read(samples, ["prompt_ids", "response_ids"])
        found: dict[int, NDArray[np.float32]] = {}
        for part in forward_passes(rows, self.context.config):
            values = await self.context.compute.run(self._frozen, rows.take(part))
            found.update(zip(part, values, strict=True))
        places = [self.keep(row.name, {COLUMN: found[number]}) for number, row in enumerate(samples)]
        return samples.with_places(places)

    def _load(self) -> CausalModel:
        """On the compute thread."""
        config = self.context.config
        refuse_unusable("reference.device", config.reference.device)
        folder, device = self.context.model_dir, config.reference.device
        return load_causal_model(folder, device, config.training.precision, float32_head=config.model.float32_head)

    def _frozen(self, rows: Batch) -> list[NDArray[np.float32]]:
        """On the compute thread; one forward pass."""
        config = self.context.config
        temperatures = [config.generation.temperature] * len(rows)
        prompts, responses = token_ids(rows)
        return frozen_logprobs(self._model, prompts, responses, temperatures, config.training.logits_chunk)
