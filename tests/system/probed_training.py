"""A trainer whose ranks answer further calls, one for each transfer protocol that a run needs seldom; worker processes
import this module."""

from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.distribute_collect import ALL_TO_ALL, DP_PROTO, THREE_D_ALL_MICRO_DP
from asyncrl.protocols.service_contracts import Idempotent, Training, endpoint
from asyncrl.services.training import TrainingService


class ProbedTraining(Training):
    @endpoint(DP_PROTO, idempotent=Idempotent.PURE)
    async def lengths(self, samples: BatchRef) -> list[int]:
        """Returns the sampled tokens of each row, which the rank reads."""
        raise NotImplementedError

    @endpoint(THREE_D_ALL_MICRO_DP, idempotent=Idempotent.PURE)
    async def prompts(self, samples: BatchRef) -> list[list[int]]:
        """Returns the tokens of each prompt, as ranks that generate together read them."""
        raise NotImplementedError

    @endpoint(ALL_TO_ALL, idempotent=Idempotent.PURE)
    async def repeat(self, note: str, times: int) -> str:
        raise NotImplementedError


class ProbedTrainingService(ProbedTraining, TrainingService):
    async def lengths(self, samples: BatchRef) -> list[int]:
        return [len(row) for row in (await self.context.reader.read(samples, ["response_ids"]))["response_ids"]]

    async def prompts(self, samples: BatchRef) -> list[list[int]]:
        return [row.tolist() for row in (await self.context.reader.read(samples, ["prompt_ids"]))["prompt_ids"]]

    async def repeat(self, note: str, times: int) -> str:
        return f"rank {self.context.spec.rank}: {note * times}"
