"""A reward model that reads prompts and answers with a tokenizer and a chat template of its own."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.config.schema import Config
from asyncrl.engines.models.scoring_models import scoring_model_folder
from asyncrl.errors import ConfigError
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.services.reward_model import RewardModelService
from tests.unit.services.source_rows import store_read_by
from tests.unit.services.test_reward_model import VOCABULARY, config, judge, make_classifier

__all__ = ["judge", "make_classifier"]

TEMPLATE = "{% for m in messages %}w1 {{ m.role }} w2 {{ m.content }} {% endfor %}"
ANSWERS = ["w4", "w5 w6 w7 w9", "w8", " ".join(f"w{number}" for number in range(10, 40))]


@pytest.fixture
def reader(make_classifier: Callable[..., Path]) -> Path:
    """The folder of a reward model whose words are others than the policy's."""
    folder = make_classifier(prefix="v", max_position_embeddings=30)
    words = {name: number for number, name in enumerate(["<unk>", "user", "assistant", "system"])}
    words |= {f"w{number}": 4 + number for number in range(VOCABULARY - 4)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def reading(**sections: Any) -> Config:
    return config(reward={"reads": "text", "on_error": "ignore"}, **sections)


async def rewards(
    settings: Config, reader: Path, policy: Path, prompt: Any, worker_context: Callable[..., Any]
) -> list[float | None]:
    source = RowStore.private("inproc://source", 64, 4096)
    parts = {"source": source, "options": {"model": str(reader)}, "model_dir": policy}
    async with asyncio.TaskGroup() as tasks:
        service = RewardModelService(worker_context("reward", settings, tasks, **parts))
        try:
            await service.start()
            rows = []
            for member, text in enumerate(ANSWERS):
                ids = np.array([1, 2], np.int32)
                columns = {"prompt_ids": ids, "response_ids": ids, "text": np.frombuffer(text.encode(), np.uint8)}
                place = store_read_by(service).put(columns)
                rows.append(RowRef(0, member, 0, 1, 2, 2, 0, 0, "stop", (place,)))
            scored = await service.score(BatchRef(tuple(rows)), {"prompt": prompt})
        finally:
            await service.stop()
    assert [score.error for score in scored[:3]] == [""] * 3
    assert " tokens, and the reward model has 30 positions" in scored[3].error
    return [score.reward for score in scored]


@pytest.mark.parametrize("prompt", ["w3 w9", [{"role": "user", "content": [{"type": "text", "text": "w3 w9"}]}]])
@pytest.mark.parametrize("system", ["", "w6"])
async def test_scores_are_those_of_the_conversation_by_its_own_template(
    prompt: Any, system: str, reader: Path, judge: Path, worker_context: Callable[..., Any]
) -> None:
    """Also where rows of several lengths share a pass; a conversation that is too long cannot be scored."""
    theirs = AutoModelForSequenceClassification.from_pretrained(reader, dtype=torch.float32).eval()
    theirs.config.pad_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(reader)
    first = [{"role": "system", "content": system}] if system else []
    expected = []
    for text in ANSWERS[:3]:
        talk = [*first, {"role": "user", "content": "w3 w9"}, {"role": "assistant", "content": text}]
        ids = tokenizer(tokenizer.apply_chat_template(talk, tokenize=False))["input_ids"]
        with torch.no_grad():
            expected.append(theirs(input_ids=torch.tensor([ids])).logits.item())
    task = {"prompts": "none", "samples_per_prompt": 4, "system": system}
    found = await rewards(reading(task=task), reader, judge, prompt, worker_context)
    assert np.std(expected) > 0.05
    np.testing.assert_allclose(np.array(found[:3], float), expected, atol=1e-5)
    assert found[3] is None


def test_a_model_that_reads_text_needs_no_tokenizer_of_the_policy_but_a_template(reader: Path, judge: Path) -> None:
    assert scoring_model_folder(reading(), str(reader), "reward.model", judge) == reader
    with pytest.raises(ConfigError, match=r"its tokenizer is not that of model\.name.*or let it read text"):
        scoring_model_folder(config(), str(reader), "reward.model", judge)
    with pytest.raises(ConfigError, match="there is no chat template in"):
        scoring_model_folder(reading(), str(judge), "reward.model", judge)
    with pytest.raises(ConfigError, match=r'^reward\.reads: "text" is for single answers'):
        scoring_model_folder(reading(environment={"use": "guess"}), str(reader), "reward.model", judge)


def test_a_path_without_a_folder_is_no_name_on_the_hub(judge: Path) -> None:
    for name in ("judge", "./owner/judge", "a/b/c", "/judge"):
        with pytest.raises(ConfigError, match=rf"^reward\.model: there is no folder {name}; write one"):
            scoring_model_folder(reading(), name, "reward.model", judge)
