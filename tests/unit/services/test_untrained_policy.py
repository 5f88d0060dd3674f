"""What the training service tells its engine about the model folder that a run began with."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import Config
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.services.training import TrainingService


@pytest.mark.parametrize(
    ("listen", "resumed", "links"), [("", False, True), ("127.0.0.1:7000", False, False), ("", True, False)]
)
async def test_only_a_trainer_on_the_host_of_the_run_links_to_the_model_it_began_with(
    listen: str,
    resumed: bool,
    links: bool,
    folder: Path,
    tmp_path: Path,
    worker_context: Callable[..., WorkerContext],
) -> None:
    config = Config.model_validate({"model": {"name": "tiny"}, "task": {"prompts": "none"}})
    config = config.model_copy(update={"fleet": config.fleet.model_copy(update={"listen": listen})})
    async with asyncio.TaskGroup() as tasks:
        first = TrainingService(worker_context("training", config, tasks, model_dir=folder))
        engine, _ = first.open_engine(RankMesh())
        facts = {"version": 0, "incarnation": 1, "chain": ""}
        engine.save(tmp_path / "0", facts)
        if resumed:
            changes = {"model_dir": folder, "checkpoint_dir": tmp_path / "0"}
            engine, found = TrainingService(worker_context("training", config, tasks, **changes)).open_engine(
                RankMesh()
            )
            assert found == facts
            engine.save(tmp_path / "again", facts)
    weights = tmp_path / ("again" if resumed else "0") / "model" / "model.safetensors"
    assert weights.is_symlink() == links
