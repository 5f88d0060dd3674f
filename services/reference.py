"""Computes log-probs of a frozen model with the code of the trainer."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.gate_config import GateConfig
from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.models.model_families import refuse_rotation_by_longest_row
from asyncrl.engines.models.prompt_pictures import PromptPictures
from asyncrl.engines.ranks.rank_mesh import RankMesh, own_device
from asyncrl.engines.training.models_with_heads import CausalModel, frozen_logprobs, idle_pass, load_causal_model
from asyncrl.engines.training.train_rows import model_rows, token_columns
from asyncrl.fleet.worker.rank_meeting import MeetingPlace
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.lanes.data.row_store import bytes_of_row
from asyncrl.protocols.batch import EXPERTS, Batch, BatchRef, reference_columns
from asyncrl.protocols.service_contracts import Reference
from asyncrl.services.ranks import LedRanks, find_meeting, open_mesh, results_of_forward_passes, warn_of_whole_load

COLUMN = "reference_logprobs"


class ReferenceService(Service, Reference):
    """Stores one row per sample: `reference_logprobs` float32 [sampled tokens]. Of several ranks the first one answers
    and keeps the rows; the others follow it."""

    renews = True

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._model: CausalModel
        self._mesh = RankMesh()
        self._ranks = LedRanks(context, self._mesh, {})

    async def start(self) -> None:
        """Loads the initial model of the run, and opens rows for every sample that can be in flight."""
        config = self.context.config
        if self.context.spec.rank == 0:
            row_bytes = bytes_of_row(reference_columns(config.response_tokens))
            self.rows = self.context.open_rows(GateConfig.of(config).row_slots, row_bytes)
        self._model = await self.context.compute.run(self._load, await find_meeting(self.context))
        self._ranks = LedRanks(self.context, self._mesh, {"logprobs": self._logprobs})

    async def stop(self) -> None:
        await self._ranks.stop()
        await super().stop()

    async def logprobs(self, samples: BatchRef) -> BatchRef:
        if self._ranks.follows:
            return samples
        logprobs = await self._ranks.run("logprobs", samples)
        places = [self.keep(row.name, {COLUMN: own}) for row, own in zip(samples, logprobs, strict=True)]
        self.add_to_counters(samples=len(places), tokens=sum(map(len, logprobs)))
        return samples.with_places(places)

    async def _logprobs(self, samples: BatchRef) -> list[NDArray[np.float32]]:
        """Computes the log-probs of these samples on all ranks."""
        columns = self._columns()
        mesh = self._mesh
        return await results_of_forward_passes(self.context, samples, self._forward, columns, see=True, mesh=mesh)

    def _columns(self) -> list[str]:
        """Returns the columns that log-probs are computed from."""
        config = self.context.config
        return [*token_columns(config), *([EXPERTS] if config.reference.router_replay else [])]

    def _load(self, meeting: MeetingPlace | None) -> CausalModel:
        config = self.context.config
        refuse_unusable("reference.device", config.reference.device)
        self._mesh = mesh = open_mesh(self.context, meeting, is_led=True)
        device = own_device(config.reference.device, mesh.rank, mesh.size)
        refuse_rotation_by_longest_row(self.context.facts.model_dir, config)
        options = {"float32_head": config.model.float32_head, "in_parts": mesh.is_parted}
        options["replay"] = config.reference.router_replay
        model = load_causal_model(self.context.facts.model_dir, device, config.training.precision, **options)
        model.share_out(mesh)
        warn_of_whole_load(self.context, model.loaded_whole)
        return model

    def _forward(self, rows: Batch, pictures: Sequence[PromptPictures | None]) -> list[NDArray[np.float32]]:
        with self._mesh.failing():
            if not len(rows):
                if self._mesh.sharding is not None:
                    idle_pass(self._model, backward=False)
                return []
            config = self.context.config
            budget = self._mesh.pass_budget(config.training.micro_batch_tokens)
            seen = model_rows(rows, config.generation.temperature, pictures)
            return frozen_logprobs(self._model, seen, config.training.logits_chunk, budget)
