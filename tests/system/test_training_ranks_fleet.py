"""Data-parallel ranks of the trainer as real processes: they train what one rank does, and die together."""

import asyncio
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from asyncrl.config.schema import Config
from asyncrl.deploy.process.fork_client import forks_of
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import StepOutcome, run_step
from asyncrl.errors import FleetFailed
from asyncrl.fleet.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.lanes.shared_memory import segment_name
from asyncrl.lanes.weights.arena import open_reader
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef
from asyncrl.protocols.hash_chain import GENESIS, chain
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Training

sys.path.insert(0, str(Path(__file__).parent))
from watching import PATIENCE

pytestmark = pytest.mark.fleet

VOCABULARY = 50
ROWS = 11
VERSIONS = 2
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, **HEADS)).save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0", pad_token="w0").save_pretrained(folder)
    return folder


def config(ranks: int) -> Config:
    return config_of(training={"learning_rate": 1e-3, "updates": 2, "layout": {"dp": ranks}})


def config_of(**sections: Any) -> Config:
    return Config.model_validate({"model": {"name": "tiny"}, "task": {"prompts": "none"}, **sections})


def rows_of(version: int) -> list[TrainRow]:
    """Ragged, in groups that no number of ranks divides."""
    draw = np.random.default_rng(version)
    return [row(draw, version, index) for index in range(ROWS)]


def row(draw: np.random.Generator, version: int, index: int) -> TrainRow:
    tokens = int(draw.integers(1, 30))
    return TrainRow(
        group=4 * version + index // 4,
        member=index % 4,
        attempt=0,
        incarnation=0,
        prompt_ids=draw.integers(0, VOCABULARY, 5),
        response_ids=draw.integers(0, VOCABULARY, tokens),
        logprobs=draw.normal(-4, 0.3, tokens).astype(np.float32),
        versions=np.full(tokens, version),
        advantage=float(draw.normal()),
    )


@pytest.fixture
def store() -> Iterator[RowStore]:
    rows = RowStore.shared(segment_name(secrets.token_hex(4), 0, "test", "rows"), (VERSIONS + 1) * ROWS, 4096)
    yield rows
    rows.close()


def cuts_of(version: int, store: RowStore) -> Cuts:
    return cuts_from(rows_of(version), version, store)


def cuts_from(rows: list[TrainRow], version: int, store: RowStore) -> Cuts:
    refs = [reference(each, store) for each in rows]
    return Cuts(0, version, BatchRef(tuple(refs)), sum(ref.tokens for ref in refs), len(refs))


def reference(row: TrainRow, store: RowStore) -> RowRef:
    integers = {name: getattr(row, name).astype(np.int32) for name in ("prompt_ids", "response_ids", "versions")}
    place = store.put({**integers, "logprobs": row.logprobs})
    version = int(row.versions[0])
    tokens = len(row.response_ids)
    return RowRef(*row.key, 0, len(row.prompt_ids), tokens, version, version, "stop", (place,), 1.0, row.advantage)


@asynccontextmanager
async def trainer(
    config: Config, model: Path, run_dir: Path, **facts_of_resume: Any
) -> AsyncIterator[tuple[RunningFleet, Training]]:
    run = secrets.token_hex(4)
    chosen = config.training.layout
    facts = RunFacts(run, run_dir, model, 0, f"asyncrl-{run}-0-weights", config, **facts_of_resume)
    with forks_of(facts.config) as forks, LocalLauncher(run, forks=forks) as launcher:
        layout = Layout(chosen.pp, chosen.tp, chosen.dp, shard=chosen.shard, sp=chosen.sp, ep=chosen.ep)
        service = "asyncrl.services.training:TrainingService"
        spec = ServiceSpec("training", Training, service, layout=layout, origin="torch")
        async with running_fleet([spec], facts, launcher=launcher, resume="asyncrl run x") as running:
            yield running, running.handle("training", Training)
    assert left_of(run) == []


def left_of(run: str) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"asyncrl-{run}-*"))


def alone(model: Path) -> tuple[list[StepOutcome], PolicyTrainer]:
    engine = PolicyTrainer(config(1), model)
    return [run_step(engine, rows_of(version), 0, version) for version in range(VERSIONS)], engine


@pytest.mark.parametrize("ranks", [2, 3])
async def test_ranks_train_like_one_process_and_end_when_one_of_them_dies(
    ranks: int, model: Path, store: RowStore, tmp_path: Path
) -> None:
    expected, one = alone(model)
    killed: list[float] = []

    async def life() -> None:
        async with asyncio.timeout(PATIENCE), trainer(config(ranks), model, tmp_path) as (running, training):
            link = await trains(training, expected, store)
            await holds(training, one)
            await answers_for_each_rank(training, ranks)
            await writes_a_checkpoint(training, ranks, link, tmp_path / "tmp-2")
            killed.append(asyncio.get_running_loop().time())
            os.kill(running.supervisor.instances["training0.1"].launched.labels["pid"], signal.SIGKILL)
            await training.step(cuts_of(VERSIONS, store))

    with pytest.raises(FleetFailed, match=r"^training0\.1 died: killed by SIGKILL\. Resume with: asyncrl run x$"):
        await life()
    assert asyncio.get_running_loop().time() - killed[0] < 8.0


async def trains(training: Training, expected: list[StepOutcome], store: RowStore) -> bytes:
    """What the plain loop does; answers with the chain."""
    link = GENESIS
    for version, outcome in enumerate(expected):
        report = await training.step(cuts_of(version, store))
        assert (report.version, report.updates, report.skipped) == (version + 1, 2, "")
        assert report.metrics == pytest.approx(outcome.metrics, rel=1e-3, abs=1e-5)
        assert tuple(report.samples) == outcome.samples
        link = chain(link, outcome.trained)
        assert report.chain == link.hex()
    return link


async def holds(training: Training, one: PolicyTrainer) -> None:
    """The arena has these weights, but for the order in which gradients were summed."""
    weights = one.named_tensors()
    published = await training.published()
    reader = open_reader(published, one.weights_spec)
    try:
        for name, tensor in reader.tensors(published).items():
            torch.testing.assert_close(tensor, weights[name], atol=1e-5, rtol=1e-4)
    finally:
        reader.close()


async def answers_for_each_rank(training: Training, ranks: int) -> None:
    healths = await training.health()
    assert [health.rank for health in healths] == list(range(ranks))
    for health in healths:
        assert health.seconds["sync"] > 0
        assert sum(health.seconds.values()) == pytest.approx(health.wall, rel=0.01)


async def writes_a_checkpoint(training: Training, ranks: int, link: bytes, folder: Path) -> None:
    await training.copy_state(0, VERSIONS)
    made = await training.checkpoint(str(folder), 0, VERSIONS)
    assert made.chain == link.hex()
    assert {f"rank-{rank}.pt" for rank in range(1, ranks)} | {"trainer.pt"} <= made.files.keys()
    assert sorted(made.files) == files_below(folder)


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
