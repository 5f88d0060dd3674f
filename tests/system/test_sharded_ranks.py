"""Ranks that hold parts of the trainer's weights (FSDP2, tensor parallel, pipeline stages) or compute slices of its
rows, as real processes: they train what one rank does, publish what one rank would, write a checkpoint that another
layout resumes, and die together.
"""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_training_ranks_fleet import HEADS, SHAPE, VOCABULARY, config_of, cuts_from, row, trainer
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from asyncrl.engines.canary_logprobs import canary_distance
from asyncrl.engines.training.models_with_heads import logprobs_after
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import StepOutcome, run_step
from asyncrl.errors import FleetFailed
from asyncrl.fleet.fleet import RunningFleet
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.lanes.shared_memory import segment_name
from asyncrl.lanes.weights.arena import open_reader
from asyncrl.protocols.service_contracts import Training

sys.path.insert(0, str(Path(__file__).parent))
from watching import PATIENCE

pytestmark = [pytest.mark.fleet, pytest.mark.ranks]

STEPS = 20
BROKEN = 4
"""Steps that are compared, and one before which a batch is not finite on one rank."""


@dataclass(frozen=True)
class Trial:
    """layouts: of the first ten steps, and of the others, which resume them. experts: family of a model with them."""

    layouts: tuple[dict[str, int], dict[str, int]]
    model: dict[str, Any]
    training: dict[str, Any]
    tied: bool = False
    experts: str = ""


TRIALS = {
    "weights": Trial(({"shard": 2}, {"dp": 2, "shard": 2}), {}, {"micro_batch_tokens": 64, "logits_chunk": 16}),
    "layers": Trial(({"tp": 2}, {"tp": 2, "shard": 2}), {}, {"micro_batch_tokens": 64, "logits_chunk": 16}, tied=True),
    "stages": Trial(({"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}), {}, {"micro_batch_tokens": 64, "logits_chunk": 16}),
    "tied stages": Trial(({"pp": 2}, {"shard": 2}), {}, {"micro_batch_tokens": 64}, tied=True),
    "slices": Trial(({"sp": 2}, {"sp": 2, "dp": 2}), {}, {"micro_batch_tokens": 64, "logits_chunk": 16}),
    "adapters": Trial(({"shard": 3}, {"shard": 2}), {"lora": {"rank": 2}}, {"gradient_checkpointing": True}, tied=True),
    "experts": Trial(({"shard": 2}, {"dp": 2}), {}, {"micro_batch_tokens": 64}, experts="qwen3_moe"),
    "routed": Trial(({"ep": 2}, {"dp": 2, "ep": 2}), {}, {"micro_batch_tokens": 64}, experts="mixtral"),
    "fewer experts": Trial(({"shard": 3}, {"shard": 2}), {}, {"gradient_checkpointing": True}, experts="mixtral"),
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


RARE = ("tied stages", "fewer experts")
"""Trials whose parts unit tests compare too."""


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.long] if name in RARE else []) for name in TRIALS])
def trial(request: pytest.FixtureRequest) -> Trial:
    return TRIALS[request.param]


@pytest.fixture
def folder(trial: Trial, tmp_path: Path) -> Path:
    torch.manual_seed(1)
    kind = type(AutoConfig.for_model(trial.experts)) if trial.experts else Qwen2Config if trial.tied else LlamaConfig
    shape = {**SHAPE, **HEADS, **(EXPERTS if trial.experts else {}), "tie_word_embeddings": trial.tied}
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(kind(**shape)).save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0", pad_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture
def store() -> Iterator[RowStore]:
    rows = RowStore.shared(segment_name(secrets.token_hex(4), 0, "test", "rows"), 12 * (STEPS + 3), 4096)
    yield rows
    rows.close()


def rows_of(version: int) -> list[TrainRow]:
    """Ragged rows; every fifth batch has one, so that all ranks but one have none."""
    draw = np.random.default_rng(version)
    return [row(draw, version, index) for index in range(1 if version % 5 == 3 else 5 + version % 7)]


def broken_rows(version: int) -> list[TrainRow]:
    """Rows of which one of each update has no finite loss."""
    first, *others, last = rows_of(version)
    return [_broken(first), *others, _broken(last)]


def _broken(row: TrainRow) -> TrainRow:
    return replace(row, logprobs=np.full_like(row.logprobs, np.nan))


def test_ranks_with_parts_train_publish_and_resume_like_one(
    trial: Trial, folder: Path, store: RowStore, tmp_path: Path
) -> None:
    configs = [_config(trial, layout) for layout in trial.layouts]
    one = PolicyTrainer(_config(trial, {}), folder)
    expected = [run_step(one, rows_of(version), 0, version) for version in range(STEPS // 2)]
    saved = tmp_path / "checkpoint"

    async def first() -> None:
        async with asyncio.timeout(PATIENCE), trainer(configs[0], folder, tmp_path) as (_, training):
            await _trains(training, expected, 0, store)
            await _publishes(training, one)
            await training.copy_state(0, STEPS // 2)
            await training.checkpoint(str(saved), 0, STEPS // 2)

    asyncio.run(first())
    _is_the_checkpoint_of_one(_config(trial, {}), saved, folder, one)
    later = [run_step(one, rows_of(version), 0, version) for version in range(STEPS // 2, STEPS)]

    async def second() -> None:
        resumed = trainer(configs[1], folder, tmp_path, checkpoint_dir=saved)
        async with asyncio.timeout(PATIENCE), resumed as (running, training):
            await _trains(training, later, STEPS // 2, store)
            await _publishes(training, one)
            _kill_last_rank(running)
            await training.step(cuts_from(rows_of(STEPS), STEPS, store))

    last = configs[1].training.layout.size - 1
    with pytest.raises(FleetFailed, match=rf"^training0\.{last} died: killed by SIGKILL\. Resume with: asyncrl run x$"):
        asyncio.run(second())


def _config(trial: Trial, layout: dict[str, int]) -> Any:
    training = {"learning_rate": 1e-4, "updates": 2, **trial.training, "layout": layout}
    return config_of(model={"name": "tiny", **trial.model}, training=training)


async def _trains(training: Training, expected: list[StepOutcome], first: int, store: RowStore) -> None:
    for version, outcome in enumerate(expected, first):
        if version == BROKEN:
            broken = await training.step(cuts_from(broken_rows(version), version, store))
            assert (broken.version, broken.skipped) == (version, "not finite")
        report = await training.step(cuts_from(rows_of(version), version, store))
        assert (report.version, report.updates, report.skipped) == (version + 1, outcome.updates, "")
        assert report.metrics["loss/policy"] == pytest.approx(outcome.metrics["loss/policy"], abs=1e-5)
        assert report.metrics["grad_norm"] == pytest.approx(outcome.metrics["grad_norm"], rel=1e-3)
        assert report.metrics == pytest.approx(outcome.metrics, rel=1e-2, abs=1e-4)
        assert tuple(report.samples) == outcome.samples


async def _publishes(training: Training, one: PolicyTrainer) -> None:
    """Readers find the weights of one rank; digest and canary hold."""
    published = await training.published()
    weights = one.named_tensors()
    reader = open_reader(published, one.weights_spec)
    try:
        reader.check(published)
        for name, tensor in reader.tensors(published).items():
            torch.testing.assert_close(tensor, weights[name], atol=1e-4, rtol=1e-3)
    finally:
        reader.close()
    logprobs = logprobs_after(one.model, np.array(published.canary.prompt)).numpy(force=True)
    assert canary_distance(published.canary, logprobs) < 1e-3


def _is_the_checkpoint_of_one(config: Any, saved: Path, base: Path, one: PolicyTrainer) -> None:
    """One rank resumes it, with all weights and moments of the ranks that wrote it."""
    found, extra = PolicyTrainer.resume(config, saved, base=base)
    assert extra["version"] == STEPS // 2
    for name, tensor in found.named_tensors().items():
        torch.testing.assert_close(tensor, one.named_tensors()[name], atol=1e-4, rtol=1e-3)
    states = [each.optimizer.parts[0].state_dict()["state"] for each in (found, one)]
    for number, moments in states[1].items():
        assert moments.keys() == states[0][number].keys()
        for name, moment in moments.items():
            torch.testing.assert_close(states[0][number][name], moment, atol=1e-4, rtol=1e-2)


def _kill_last_rank(running: RunningFleet) -> None:
    last = max(running.supervisor.instances)
    os.kill(running.supervisor.instances[last].launched.labels["pid"], signal.SIGKILL)
