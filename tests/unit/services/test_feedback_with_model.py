"""A reward model stands in for the person where nobody rated."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from asyncrl.config.schema import Config
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.services.reward_model import FeedbackWithModelService
from tests.unit.services.conftest import VOCABULARY


@pytest.fixture(scope="module")
def judge(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("judge")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForSequenceClassification(LlamaConfig(vocab_size=VOCABULARY, num_labels=1, **sizes)).save_pretrained(path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    return path


@pytest.mark.parametrize("group", [4, -1])
async def test_the_model_stands_in_for_a_person(
    group: int, worker_context: Callable[..., WorkerContext], judge: Path, folder: Path, tmp_path: Path
) -> None:
    config = Config.model_validate(
        {
            "model": {"name": "m"},
            "task": {"prompts": "rows.jsonl"},
            "reward": {"model": str(judge)},
            "feedback": {"ask": "rate", "deadline": 0.01, "otherwise": "model", "weight": 2.0},
        }
    )
    store = RowStore.private("inproc://source", 4, 1024)
    ids = {"prompt_ids": np.array([1, 2], np.int32), "response_ids": np.array([3, 4], np.int32)}
    place = store.put({**ids, "text": np.frombuffer(b"text", np.uint8)})
    refs = BatchRef((RowRef(group, 0, 0, 1, 2, 2, 0, 0, "stop", (place,)),))
    options = {"host": "127.0.0.1", "port": 0, "key": "the-right-key", "model": str(judge)}
    async with asyncio.TaskGroup() as tasks:
        parts = {"source": store, "run_dir": tmp_path, "options": options, "model_dir": folder}
        service = FeedbackWithModelService(worker_context("reward", config, tasks, **parts))
        await service.start()
        (score,) = await service.score(refs, {"prompt": "p"})
        await service.stop()
    assert set(score.terms) == {"model", "person"}
    assert score.terms["person"] == pytest.approx(1 / (1 + math.exp(-score.terms["model"])))
    assert score.reward == pytest.approx(2 * score.terms["person"])
