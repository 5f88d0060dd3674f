"""Checkpoints whose trainer is several ranks, each of which writes its parts."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from asyncrl.controller.journal.checkpoints import commit
from asyncrl.controller.journal.run_storage import FileStore
from asyncrl.engines.models.tensor_parts import TensorPart
from asyncrl.engines.ranks.shards import Parts
from asyncrl.engines.training.trainer_checkpoint import StateCopy
from asyncrl.protocols.messages import Checkpointed
from tests.unit.controller.journal.saga import Saga, planned


class RankKilled(Exception):
    """A rank ends before it has written."""


async def checkpoint(saga: Saga, killed: int | None = None) -> None:
    async def write(directory: str) -> Checkpointed:
        files: dict[str, str] = {}
        for rank in range(2):
            if rank == killed:
                raise RankKilled
            own: Parts = {"weights": {"q": TensorPart(torch.ones(2), (2 * rank,))}, "moments": {}}
            model: Callable[[Path], None] | None = None if rank else lambda folder: (folder / "model").mkdir()
            files |= StateCopy({}, model, rank, own, 2).write(Path(directory))
        return saga.answer(files)

    await commit(saga.journal, write, keep=2)


async def test_the_older_checkpoint_is_used_when_a_rank_did_not_write_or_its_file_is_gone(tmp_path: Path) -> None:
    with closing(FileStore(tmp_path)) as store:
        saga = Saga(4, store)
        await checkpoint(saga)
        saga.train()
        with pytest.raises(RankKilled):
            await checkpoint(saga, killed=1)
        assert (tmp_path / "checkpoints" / "tmp-1" / "parts" / "rank-0-weights.safetensors").exists()
        plan = planned(store)
        assert (plan.version, plan.said) == (0, ())
        saga.train()
        await checkpoint(saga)
        assert planned(store).version == 2
        (tmp_path / "checkpoints" / "2" / "parts" / "rank-1-moments.safetensors").unlink()
        plan = planned(store)
        assert plan.version == 0
        assert plan.said == ("checkpoint 2 cannot be used: parts/rank-1-moments.safetensors is missing",)
