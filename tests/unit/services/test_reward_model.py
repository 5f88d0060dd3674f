"""The reward service with a model, on tiny ones: scores of token ids, alone and beside functions."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, RewardError
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.services.reward_model import RewardModelService
from tests.unit.services.source_rows import store_read_by

VOCABULARY = 50
FUNCTIONS = """
def tokens(sample):
    return float(sample.tokens)
"""
Serving = Callable[..., AbstractAsyncContextManager[RewardModelService]]


@pytest.fixture(scope="module")
def make_classifier(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_classifier(kind, **config) -> folder of a tiny model with random weights, dropout and a tokenizer."""

    def make(kind: Any = LlamaForSequenceClassification, prefix: str = "w", **changes: Any) -> Path:
        torch.manual_seed(2)
        folder = tmp_path_factory.mktemp("judge")
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        # The padding id is one that answers hold: comparing ids with it would find their ends in the wrong places.
        options = {"num_labels": 1, "pad_token_id": 3, "attention_dropout": 0.5, **changes}
        model = kind(LlamaConfig(vocab_size=VOCABULARY, **sizes, **options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5 if parameter.ndim > 1 else 1)
        model.save_pretrained(folder)
        vocabulary = {f"{prefix}{number}": number for number in range(VOCABULARY)}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token=f"{prefix}0"))
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"{prefix}3").save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def judge(make_classifier: Callable[..., Path]) -> Path:
    return make_classifier()


def config(deterministic: bool = False, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"name": "tiny"},
            "task": {"prompts": "none", "samples_per_prompt": 3},
            "generation": {"deterministic": deterministic},
            "reward": {"model": "a folder", **sections.pop("reward", {})},
            "training": {"micro_batch_tokens": 60},
            **sections,
        }
    )


@pytest.fixture
def serving(worker_context: Callable[..., WorkerContext], judge: Path) -> Serving:
    torch.set_num_threads(1)

    @asynccontextmanager
    async def serve(settings: Config | None = None, model: Path = judge) -> AsyncIterator[RewardModelService]:
        parts = {
            "source": RowStore.private("inproc://source", 64, 4096),
            "options": {"model": str(model)},
            "model_dir": judge,
        }
        async with asyncio.TaskGroup() as tasks:
            service = RewardModelService(worker_context("reward", settings or config(), tasks, **parts))
            try:
                await service.start()
                yield service
            finally:
                await service.stop()

    return serve


def sampled(service: RewardModelService, count: int = 9) -> BatchRef:
    """Ragged rows as generation leaves them; some end with the padding id."""
    draw = np.random.default_rng(5)
    store = store_read_by(service)
    rows = []
    for member in range(count):
        prompt = draw.integers(0, VOCABULARY, 2 + member)
        response = draw.integers(0, VOCABULARY, 14 - member)
        response[-1:] = 3 if member % 2 else response[-1]
        columns = {"prompt_ids": prompt.astype(np.int32), "response_ids": response.astype(np.int32)}
        place = store.put({**columns, "text": np.frombuffer(b"text", np.uint8)})
        rows.append(RowRef(0, member, 0, 1, len(prompt), len(response), 0, 0, "stop", (place,)))
    return BatchRef(tuple(rows))


def whole(service: RewardModelService, refs: BatchRef) -> list[np.ndarray]:
    columns = ("prompt_ids", "response_ids")
    return [np.concatenate(store_read_by(service).read(ref.places[0], columns)).astype(np.int64) for ref in refs]


async def rewards(service: RewardModelService, refs: BatchRef) -> list[float | None]:
    return [score.reward for score in await service.score(refs, {"prompt": "p"})]


async def test_a_score_is_transformers_own_of_the_row_alone(serving: Serving, judge: Path) -> None:
    """Also where the row ends with what the tokenizer calls padding: the row given to transformers is one without."""
    theirs = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    theirs.config.pad_token_id = None
    async with serving() as service:
        refs = sampled(service)
        with torch.no_grad():
            expected = [theirs(input_ids=torch.from_numpy(ids)[None]).logits.item() for ids in whole(service, refs)]
        found = await rewards(service, refs)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-5)


async def test_rows_together_equal_rows_alone(serving: Serving) -> None:
    async with serving() as service:
        refs = sampled(service)
        together = await rewards(service, refs)
        alone = [(await rewards(service, refs.take([row])))[0] for row in range(len(refs))]
    np.testing.assert_allclose(together, alone, atol=1e-5)
    async with serving(config(deterministic=True)) as service:
        refs = sampled(service)
        assert await rewards(service, refs) == [(await rewards(service, refs.take([row])))[0] for row in range(9)]


async def test_it_combines_with_functions_by_weight(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    functions = [{"use": f"{tmp_path}/mine.py:tokens", "weight": 0.5}]
    async with serving() as service:
        plain = await rewards(service, sampled(service))
    async with serving(config(reward={"functions": functions, "weight": -2.0})) as service:
        scores = await service.score(refs := sampled(service), {"prompt": "p"})
    for score, alone, ref in zip(scores, plain, refs, strict=True):
        assert score.terms == pytest.approx({"tokens": ref.tokens, "model": alone})
        assert score.reward == pytest.approx(0.5 * ref.tokens - 2.0 * alone)


@pytest.mark.parametrize(("on_error", "expected"), [("zero", 0.0), ("ignore", None)])
async def test_a_score_that_is_not_finite_is_unscorable_as_that_of_a_function(
    serving: Serving, on_error: str, expected: float | None
) -> None:
    async with serving(config(reward={"on_error": on_error})) as service:
        service._model.head.weight.fill_(float("nan"))
        (score, *_) = await service.score(sampled(service), {"prompt": "p"})
    assert score.reward == expected
    assert "reward function model on member 0 of group 0: what it returned is nan" in score.error
    async with serving() as service:
        service._model.head.weight.fill_(float("nan"))
        with pytest.raises(RewardError, match=r"(?s)is nan.*reward\.on_error"):
            await service.score(sampled(service), {"prompt": "p"})


async def test_a_token_classifier_is_read_at_the_last_token(
    serving: Serving, make_classifier: Callable[..., Path]
) -> None:
    folder = make_classifier(LlamaForTokenClassification)
    model = LlamaForTokenClassification.from_pretrained(folder)
    with torch.no_grad():
        model.score.bias.fill_(7.0)
    model.save_pretrained(folder)
    async with serving(model=folder) as service:
        refs = sampled(service)
        with torch.no_grad():
            expected = [
                model.eval()(input_ids=torch.from_numpy(i)[None]).logits[0, -1, 0] for i in whole(service, refs)
            ]
        np.testing.assert_allclose(await rewards(service, refs), expected, atol=1e-5)


async def test_a_folder_without_a_trained_head_is_refused(
    serving: Serving, make_classifier: Callable[..., Path]
) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(ConfigError, match=r"holds no score\.weight, so its scores would be noise")
    ):
        async with serving(model=make_classifier(LlamaForCausalLM)):
            pass


async def test_two_labels_are_refused(serving: Serving, make_classifier: Callable[..., Path]) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="another number of labels than 1")):
        async with serving(model=make_classifier(num_labels=2)):
            pass


async def test_a_model_with_another_tokenizer_is_refused(
    serving: Serving, make_classifier: Callable[..., Path]
) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=r"^reward\.model: its tokenizer is not that")):
        async with serving(model=make_classifier(prefix="v")):
            pass


async def test_frequencies_that_follow_the_longest_row_are_refused(
    serving: Serving, make_classifier: Callable[..., Path]
) -> None:
    rotary = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = make_classifier(max_position_embeddings=64, rope_parameters=rotary)
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=r"reward\.model: .*'dynamic'.* passes 64 tokens")):
        async with serving(model=model):
            pass


async def test_a_device_that_is_not_there_is_refused_by_its_key(serving: Serving) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=r'^reward\.device = "cuda:99" cannot be used')):
        async with serving(config(reward={"device": "cuda:99"})):
            pass


async def test_damaged_weights_are_refused(serving: Serving, judge: Path, tmp_path: Path) -> None:
    shutil.copytree(judge, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=r"model\.safetensors")):
        async with serving(model=tmp_path / "cut"):
            pass
