"""The engine that answers from a file: stored tokens and log-probs, with the version of the weights in use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.engines.generation.engine_interface import NO_WEIGHTS, SampleRequest
from asyncrl.engines.generation.torch_engine import StoredSampleEngine, TorchEngine
from asyncrl.errors import ConfigError, TaskError
from asyncrl.protocols.batch import RowRef
from asyncrl.protocols.messages import SampleText, TrainedSample
from asyncrl.tasks.stored_samples import write_samples
from asyncrl.telemetry.samples_file import SampleRecord, sample_record
from tests.unit.engines.generation.conftest import engine_config, make_model

MakeEngine = Callable[..., TorchEngine]
PROMPT = np.array([40, 41], np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("model"))


def stored(text: str, ids: list[int]) -> SampleRecord:
    ref = RowRef(0, 0, 0, 0, 2, len(ids), 6, 7, "length", ())
    logprobs = tuple(-0.5 for _ in ids)
    tokens = {"token_ids": tuple(ids), "token_logprobs": logprobs, "token_versions": tuple(6 for _ in ids)}
    sample = SampleText(0, 0, "prompt", text, prompt_ids=(40, 41), **tokens)
    return sample_record(1, ref, sample, {}, TrainedSample(0, 0, 0, len(ids), 0))


def engine(model: Path, folder: Path, record: SampleRecord, version: int) -> StoredSampleEngine:
    path = folder / "samples.parquet"
    write_samples(path, "a", [record], lambda group: None)
    config = engine_config(stored_samples=str(path), max_new_tokens=8)
    task = config.task.model_copy(update={"samples_per_prompt": 1})
    return StoredSampleEngine(model, config.model_copy(update={"task": task}), version)


def request(group: int, not_before: int = 0, prompt: Any = PROMPT) -> SampleRequest:
    return SampleRequest((group, 0, 0), prompt, 7, 1.0, 8, not_before)


def text_of(model: Path, ids: list[int]) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(model).decode(ids))


def test_requests_get_stored_tokens_once_weights_are_new_enough(model: Path, tmp_path: Path) -> None:
    ids = [50, 51, 52]
    made = engine(model, tmp_path, stored(text_of(model, ids), ids), 4)
    made.submit(request(0), request(1, not_before=5), request(2))
    assert (made.waiting, made.active, made.running) == (3, True, 0)
    done = made.step()
    assert [each.request.key[0] for each in done] == [0, 2]
    assert done[0].tokens.tolist() == ids
    assert done[0].logprobs.tolist() == [-0.5] * 3
    assert done[0].versions.tolist() == [4] * 3
    assert (done[0].finish, done[0].text) == ("length", text_of(model, ids))
    assert (made.waiting, made.active, made.step()) == (1, False, [])
    made.version = 5
    assert [each.versions[0] for each in made.step()] == [5]


def test_nothing_is_answered_without_weights_or_after_its_end(model: Path, tmp_path: Path) -> None:
    ids = [50]
    made = engine(model, tmp_path, stored(text_of(model, ids), ids), NO_WEIGHTS)
    made.submit(request(0), request(1))
    assert not made.active
    assert made.end([(0, 0, 0)], "abort") == []
    made.version = 0
    assert [each.request.key[0] for each in made.step()] == [1]


def test_another_prompt_and_another_tokenizer_are_refused(model: Path, tmp_path: Path) -> None:
    ids = [50, 51]
    made = engine(model, tmp_path, stored(text_of(model, ids), ids), 0)
    with pytest.raises(TaskError, match="has no samples of this prompt"):
        made.submit(request(0, prompt=np.array([40], np.int32)))
    assert made.waiting == 0
    with pytest.raises(ConfigError, match="has tokens of another tokenizer than tiny"):
        engine(model, tmp_path, stored("other words", ids), 0)
