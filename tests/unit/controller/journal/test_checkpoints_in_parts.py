"""Checkpoints whose trainer is several ranks, each of which writes its parts."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.controller.journal.checkpoints import commit, plan_resume
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.ledger import Trained
from asyncrl.controller.journal.run_storage import FileStore
from asyncrl.engines.models.tensor_parts import TensorPart
from asyncrl.engines.ranks.shards import Parts
from asyncrl.engines.training.trainer_checkpoint import StateCopy
from asyncrl.protocols.messages import Checkpointed


class RankKilled(Exception):
    """A rank ends before it has written."""


def write_parts_of_ranks(directory: Path, killed: int | None) -> dict[str, str]:
    """Writes what two ranks hold, one after the other."""
    files: dict[str, str] = {}
    for rank in range(2):
        if rank == killed:
            raise RankKilled
        own: Parts = {"weights": {"q": TensorPart(torch.ones(2), (2 * rank,))}, "moments": {}}
        model: Callable[[Path], None] | None = None if rank else lambda folder: (folder / "model").mkdir()
        files |= StateCopy({}, model, rank, own, 2).write(directory)
    return files


async def checkpoint(journal: Journal, killed: int | None = None) -> None:
    async def write(directory: str) -> Checkpointed:
        files = write_parts_of_ranks(Path(directory), killed)
        return Checkpointed(journal.ledger.version, journal.ledger.chain.hex(), files)

    await commit(journal, write, keep=2)


def train(journal: Journal, history: Any) -> None:
    while True:
        record = history.step()
        journal.append(record)
        if isinstance(record, Trained):
            return


async def test_the_older_checkpoint_is_used_when_a_rank_did_not_write_or_its_file_is_gone(
    run: Any, tmp_path: Path
) -> None:
    with closing(FileStore(tmp_path)) as store:
        journal = Journal(store)
        history = run(4)
        await checkpoint(journal)
        train(journal, history)
        with pytest.raises(RankKilled):
            await checkpoint(journal, killed=1)
        assert (tmp_path / "checkpoints" / "tmp-1" / "parts" / "rank-0-weights.safetensors").exists()
        plan = plan_resume(store)
        assert plan is not None
        assert (plan.version, plan.said) == (0, ())
        train(journal, history)
        await checkpoint(journal)
        plan = plan_resume(store)
        assert plan is not None
        assert plan.version == 2
        (tmp_path / "checkpoints" / "2" / "parts" / "rank-1-moments.safetensors").unlink()
        plan = plan_resume(store)
        assert plan is not None
        assert plan.version == 0
        assert plan.said == ("checkpoint 2 cannot be used: parts/rank-1-moments.safetensors is missing",)
