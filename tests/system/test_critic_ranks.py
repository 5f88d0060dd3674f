"""Ranks of a critic as real processes: they value and learn what one rank does, in whatever order calls reach them,
write a checkpoint that another layout resumes, and die together.
"""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_training_ranks_fleet import config_of, files_below, left_of, model, reference, row

from asyncrl.config.schema import Config
from asyncrl.deploy.process.fork_client import forks_of
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.deploy.service_specs import service_specs
from asyncrl.engines.models.tensor_parts import gather_model
from asyncrl.engines.training.critic_trainer import CriticTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step
from asyncrl.errors import FleetFailed, LostRows
from asyncrl.fleet.fleet import RunningFleet, running_fleet
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.lanes.data.row_reader import RowReader
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.lanes.shared_memory import segment_name
from asyncrl.protocols.batch import BatchRef, Cuts
from asyncrl.protocols.service_contracts import Critic

sys.path.insert(0, str(Path(__file__).parent))
from watching import PATIENCE

pytestmark = [pytest.mark.fleet, pytest.mark.ranks]

STEPS = 20
FILES = {
    "shard": {f"critic/parts/rank-{rank}-{kind}.safetensors" for rank in (0, 1) for kind in ("weights", "moments")},
    "dp": {"critic/model/model.safetensors"},
}
MODEL = model


@pytest.fixture
def store() -> Iterator[RowStore]:
    rows = RowStore.shared(segment_name(secrets.token_hex(4), 0, "test", "rows"), 14 * (STEPS + 1), 4096)
    yield rows
    rows.close()


def config(layout: dict[str, int]) -> Config:
    training = {"learning_rate": 1e-4, "updates": 2, "micro_batch_tokens": 64}
    algorithm = {"preset": "ppo", "kl": 0.0}
    return config_of(algorithm=algorithm, training=training, critic={"layout": layout, "learning_rate": 1e-3})


def rows_of(version: int) -> list[TrainRow]:
    """Ragged rows; every fifth batch has one, so that all ranks with rows of their own but one have none."""
    draw = np.random.default_rng(version)
    return [row(draw, version, index) for index in range(1 if version % 5 == 3 else 5 + version % 7)]


@asynccontextmanager
async def critics(
    config: Config, model: Path, run_dir: Path, **facts_of_resume: Any
) -> AsyncIterator[tuple[RunningFleet, Critic]]:
    run = secrets.token_hex(4)
    facts = RunFacts(run, run_dir, model, 0, f"asyncrl-{run}-0-weights", config, **facts_of_resume)
    specs = [spec for spec in service_specs(config) if spec.name == "critic"]
    with forks_of(config) as forks, LocalLauncher(run, forks=forks) as launcher:
        async with running_fleet(specs, facts, launcher=launcher, resume="asyncrl run x") as running:
            yield running, running.handle("critic", Critic)
    assert left_of(run) == []


class OneRank(NamedTuple):
    """Does in this process what the ranks of the fleet do together."""

    critic: CriticTrainer

    def values(self, rows: list[TrainRow]) -> list[np.ndarray]:
        return self.critic.values(rows)

    def learn(self, rows: list[TrainRow], version: int) -> dict[str, float]:
        updates = self.critic.optimizer.updates
        values = self.values(rows)
        valued = [replace(each, values=own, valued_at=updates) for each, own in zip(rows, values, strict=True)]
        return run_step(self.critic, valued, 0, version).metrics


async def learns(critic: Critic, one: OneRank, versions: range, store: RowStore) -> None:
    """Each step is that of one rank, also while samples of later ones are valued."""
    async with RowReader(InprocWire(), RunFacts("x", Path(), Path(), 0, "", config({})).hello("t", 0, "t")) as reader:
        for version in versions:
            refs = BatchRef(tuple(reference(each, store) for each in rows_of(version)))
            valued = await critic.values(refs)
            found = await reader.read(valued, ["values", "valued_at"])
            for own, expected in zip(found["values"], one.values(rows_of(version)), strict=True):
                np.testing.assert_allclose(own, expected, atol=1e-5)
            later = BatchRef(tuple(ref._replace(group=ref.group + 1000) for ref in refs))
            cuts = Cuts(0, version, valued, sum(ref.tokens for ref in refs), len(refs))
            valuing = [asyncio.create_task(critic.values(later)) for _ in range(3)]
            report = await critic.update(cuts)
            await asyncio.gather(*valuing)
            metrics = one.learn(rows_of(version), version)
            assert report.metrics["critic/loss"] == pytest.approx(metrics["critic/loss"], abs=1e-5)
            assert report.metrics["critic/grad_norm"] == pytest.approx(metrics["critic/grad_norm"], rel=1e-3)
            assert report.metrics == pytest.approx(metrics, rel=1e-2, abs=1e-4)
            await critic.release([ref.name for ref in (*refs, *later)], 0)


@pytest.mark.parametrize(
    ("first", "second"),
    [({"shard": 2}, {"tp": 2}), ({"dp": 2}, {"dp": 2, "shard": 2})],
    ids=["parts", "copies"],
)
def test_ranks_of_a_critic_do_what_one_does(
    first: dict[str, int], second: dict[str, int], model: Path, store: RowStore, tmp_path: Path
) -> None:
    one = OneRank(CriticTrainer(config({}), model))
    saved = tmp_path / "checkpoint"
    half = STEPS // 2

    async def before() -> None:
        async with asyncio.timeout(PATIENCE), critics(config(first), model, tmp_path) as (_, critic):
            await learns(critic, one, range(half), store)
            await critic.copy_state(0, half)
            made = await critic.checkpoint(str(saved), 0, half)
            assert sorted(made.files) == files_below(saved)
            assert FILES[next(iter(first))] | {"critic/rank-1.pt", "critic/trainer.pt"} <= made.files.keys()

    async def after() -> None:
        resumed = critics(config(second), model, tmp_path, checkpoint_dir=saved)
        async with asyncio.timeout(PATIENCE), resumed as (running, critic):
            await learns(critic, one, range(half, STEPS), store)
            await loses_rows(critic, store)
            last = max(running.supervisor.instances)
            os.kill(running.supervisor.instances[last].launched.labels["pid"], signal.SIGKILL)
            await critic.values(BatchRef((reference(rows_of(0)[0], store),)))

    asyncio.run(before())
    if "shard" in first:
        gather_model(saved / "critic" / "model", tmp_path / "exported")
        exported = OneRank(CriticTrainer(config({}), tmp_path / "exported"))
        for own, expected in zip(exported.values(rows_of(0)), one.values(rows_of(0)), strict=True):
            np.testing.assert_allclose(own, expected, atol=1e-5)
    last = config(second).critic.layout.size - 1
    with pytest.raises(FleetFailed, match=rf"^critic0\.{last} died: killed by SIGKILL\. Resume with: asyncrl run x$"):
        asyncio.run(after())


async def loses_rows(critic: Critic, store: RowStore) -> None:
    """A row that is gone is an error of the whole call, and the ranks go on."""
    refs = [reference(each, store) for each in rows_of(2)]
    store.free([refs[1].places[0]])
    with pytest.raises(LostRows):
        await critic.values(BatchRef(tuple(refs)))
    assert len(await critic.values(BatchRef(tuple(refs[2:])))) == len(refs) - 2
