"""The reference service on a tiny model: the trainer's own log-probs, and rows that do not depend on each other."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config.schema import Config
from asyncrl.engines.training.micro_batches import forward_passes
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step
from asyncrl.errors import ConfigError
from asyncrl.protocols.batch import BatchRef
from asyncrl.services.reference import ReferenceService
from tests.unit.services.conftest import VOCABULARY, Serve, put_row, store_read_by

CAP = 24


def config(deterministic: bool = True, budget: int = 8192) -> Config:
    return Config.model_validate(
        {
            "model": {"name": "tiny"},
            "task": {"prompts": "none", "prompts_per_step": 2, "samples_per_prompt": 4},
            "generation": {"deterministic": deterministic, "max_new_tokens": CAP, "temperature": 0.7, "slots": 8},
            "training": {"micro_batch_tokens": budget},
            "algorithm": {"kl": 0.1},
        }
    )


@pytest.fixture
def serving(serve: Serve) -> Serve:
    return lambda folder, settings: serve(ReferenceService, "reference", settings, model_dir=folder)


def samples(service: ReferenceService, count: int = 6) -> BatchRef:
    draw = np.random.default_rng(0)
    store = store_read_by(service)
    rows = []
    for index in range(count):
        prompt = draw.integers(0, VOCABULARY, 3 + index)
        response = draw.integers(0, VOCABULARY, CAP - 4 * index)
        rows.append(put_row(store, prompt_ids=prompt, response_ids=response, group=index // 4, member=index % 4))
    return BatchRef(tuple(rows))


def found(service: ReferenceService, refs: BatchRef) -> list[np.ndarray]:
    return [service.rows.read(ref.place_of("reference_logprobs"), ["reference_logprobs"])[0] for ref in refs]


async def test_every_sample_gets_one_more_place_with_a_value_a_token(folder: Path, serving: Serve) -> None:
    async with serving(folder, config()) as service:
        refs = samples(service)
        for _ in range(8):  # Answers that nobody waited for take no room for ever.
            answer = await service.logprobs(refs)
        assert service.rows.used == len(refs)
        assert [ref.places[0] for ref in answer] == [ref.places[0] for ref in refs]
        (health,) = await service.health()
        assert (health.version, health.counters) == (
            None,
            {"samples": 48, "tokens": 8 * sum(ref.tokens for ref in refs), "row_bytes_read": 0, "rows_refused": 0},
        )
        for ref, values in zip(answer, found(service, answer), strict=True):
            assert values.dtype == np.float32
            assert len(values) == ref.tokens
        await service.release([ref.name for ref in answer], oldest=0)
        assert service.rows.used == 0


@pytest.mark.parametrize("exact", [False, True])
async def test_its_head_is_as_exact_as_the_trainers(folder: Path, serving: Serve, exact: bool) -> None:
    plain = config().model_dump()
    rounded = plain["model"] | {"float32_head": exact}, plain["training"] | {"precision": "bfloat16"}
    settings = Config.model_validate(plain | dict(zip(("model", "training"), rounded, strict=True)))
    async with serving(folder, settings) as service:
        assert service._model.float32_head is exact


async def test_bits_of_a_row_depend_on_no_neighbour_when_deterministic(folder: Path, serving: Serve) -> None:
    async with serving(folder, config()) as service:
        refs = samples(service)
        together = found(service, await service.logprobs(refs))
        for index in range(len(refs)):
            (alone,) = found(service, await service.logprobs(refs.take([index])))
            assert together[index].tobytes() == alone.tobytes()


async def test_otherwise_rows_share_passes_and_agree_within_rounding(folder: Path, serving: Serve) -> None:
    async with serving(folder, config(deterministic=False, budget=70)) as service:
        refs = samples(service)
        together = found(service, await service.logprobs(refs))
        columns = await service.context.reader.read(refs, ["prompt_ids", "response_ids"])
        assert 1 < len(forward_passes(columns, service.context.config)) < 6
        for index in range(len(refs)):
            (alone,) = found(service, await service.logprobs(refs.take([index])))
            np.testing.assert_allclose(together[index], alone, atol=1e-5)


async def test_an_unchanged_policy_has_no_kl_to_its_reference(folder: Path, serving: Serve) -> None:
    """Trainer and reference compute log-probs by the same code, at the same temperature."""
    settings = config()
    async with serving(folder, settings) as service:
        refs = samples(service)
        reference = found(service, await service.logprobs(refs))
        batch = await service.context.reader.read(refs, ["prompt_ids", "response_ids"])
    rows = [
        TrainRow(
            group=ref.group,
            member=ref.member,
            attempt=0,
            incarnation=1,
            prompt_ids=batch["prompt_ids"][index].astype(np.int64),
            response_ids=batch["response_ids"][index].astype(np.int64),
            logprobs=values,
            versions=np.zeros(len(values), np.int64),
            advantage=1.0,
            temperature=0.7,
            reference_logprobs=values,
        )
        for index, (ref, values) in enumerate(zip(refs, reference, strict=True))
    ]
    outcome = run_step(PolicyTrainer(settings, folder), rows, 1, 0)
    assert outcome.metrics["loss/kl"] == pytest.approx(0, abs=1e-9)
    assert outcome.metrics["policy/logprob_difference_max"] < 1e-5


async def test_frequencies_that_follow_the_longest_row_are_refused(
    folder: Path, serving: Serve, tmp_path: Path
) -> None:
    """In deterministic mode too: prompt and answer of one row pass the original length by themselves."""
    shutil.copytree(folder, tmp_path / "model")
    described = tmp_path / "model/config.json"
    rotary = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    described.write_text(json.dumps(json.loads(described.read_text()) | rotary))
    said = pytest.RaisesExc(ConfigError, match=r"model\.name: .*'dynamic'.* once it passes 64 tokens")
    with pytest.RaisesGroup(said):
        async with serving(tmp_path / "model", config()):
            pass
