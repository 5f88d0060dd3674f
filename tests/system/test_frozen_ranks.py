"""Ranks of the reference and of models of reward and cost as real processes: log-probs and scores are those of one
rank, whatever the order in which calls reach them.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_training_ranks_fleet import VOCABULARY, config_of, left_of, model, row
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.config.schema import Config
from asyncrl.deploy.process.fork_client import forks_of
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.deploy.service_specs import service_specs
from asyncrl.engines.training.models_with_heads import frozen_logprobs, load_causal_model, load_score_model
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.errors import FleetFailed
from asyncrl.fleet.fleet import RunningFleet, running_fleet
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.lanes.data.row_reader import RowReader
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.lanes.shared_memory import segment_name
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.service_contracts import Reference, Reward

pytestmark = [pytest.mark.fleet, pytest.mark.ranks]

MODEL = model
BATCHES = (1, 7, 3, 11)
"""Rows of each call; of one row a rank with rows of its own has none."""
FROZEN = ("reference", "reward", "cost")
COSTS = {"limit": 0.0, "weight": 2.0}
TEMPLATE = "{% for m in messages %}w1 {{ m.content }} {% endfor %}"
PROMPT = "w3 w9"


@pytest.fixture
def store() -> Iterator[RowStore]:
    rows = RowStore.shared(segment_name(secrets.token_hex(4), 0, "test", "rows"), sum(BATCHES), 4096)
    yield rows
    rows.close()


@pytest.fixture
def judge(model: Path, tmp_path: Path) -> Path:
    """The folder of a reward model with the policy's tokenizer and a chat template."""
    torch.manual_seed(5)
    scoring = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, pad_token_id=0)
    scoring.save_pretrained(tmp_path / "judge")
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0", pad_token="w0")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path / "judge")
    return tmp_path / "judge"


def config(layout: dict[str, int], reads: str, judge: Path, costs: dict[str, float]) -> Config:
    scorer = {"model": str(judge), "reads": reads, "layout": layout}
    return config_of(
        algorithm={"preset": "safe_rlhf" if costs else "grpo", "kl": 0.1},
        training={"micro_batch_tokens": 64, "logits_chunk": 16},
        reference={"layout": layout},
        reward=scorer,
        **({"cost": {**scorer, **costs}} if costs else {}),
    )


@asynccontextmanager
async def frozen(config: Config, model: Path, judge: Path, run_dir: Path) -> AsyncIterator[RunningFleet]:
    run = secrets.token_hex(4)
    facts = RunFacts(run, run_dir, model, 0, f"asyncrl-{run}-0-weights", config)
    specs = [spec for spec in service_specs(config) if spec.name in FROZEN]
    specs = [spec if spec.name == "reference" else replace(spec, options={"model": str(judge)}) for spec in specs]
    with forks_of(config) as forks, LocalLauncher(run, forks=forks) as launcher:
        async with running_fleet(specs, facts, launcher=launcher, resume="asyncrl run x") as running:
            yield running
    assert left_of(run) == []


def batches() -> list[list[TrainRow]]:
    draw = np.random.default_rng(3)
    return [[row(draw, number, index) for index in range(count)] for number, count in enumerate(BATCHES)]


def text_of(row: TrainRow) -> str:
    return " ".join(f"w{token}" for token in row.response_ids)


def reference(row: TrainRow, store: RowStore) -> RowRef:
    ids = {name: getattr(row, name).astype(np.int32) for name in ("prompt_ids", "response_ids")}
    place = store.put({**ids, "text": np.frombuffer(text_of(row).encode(), np.uint8)})
    tokens = len(row.response_ids)
    return RowRef(*row.key, 0, len(row.prompt_ids), tokens, 0, 0, "stop", (place,))


@pytest.mark.parametrize(
    ("layout", "reads", "costs"),
    [({"tp": 2}, "tokens", {}), ({"shard": 2}, "text", COSTS)],
    ids=["tp", "shard"],
)
def test_ranks_of_frozen_models_compute_what_one_does(
    layout: dict[str, int],
    reads: str,
    costs: dict[str, float],
    model: Path,
    judge: Path,
    store: RowStore,
    tmp_path: Path,
) -> None:
    settings = config(layout, reads, judge, costs)
    parts = batches()
    refs = [BatchRef(tuple(reference(each, store) for each in rows)) for rows in parts]

    async def life() -> None:
        async with asyncio.timeout(200), frozen(settings, model, judge, tmp_path) as running:
            computing = running.handle("reference", Reference)
            scorers = {name: running.handle(name, Reward) for name in settings.scorers}
            stored = await asyncio.gather(*(computing.logprobs(each) for each in refs))
            await _are_the_logprobs_of_one_rank(stored, parts, model)
            calls = [each.score(batch, {"prompt": PROMPT}) for each in scorers.values() for batch in refs]
            scores = await asyncio.gather(*calls)
            one = scores_of_one_rank(parts, reads, judge)
            expected = [settings.scorers[name].weight * score for name in scorers for each in one for score in each]
            found = [score.reward for each in scores for score in each]
            np.testing.assert_allclose(np.array(found, float), expected, atol=1e-5)
            os.kill(running.supervisor.instances["reference0.1"].launched.labels["pid"], signal.SIGKILL)
            await computing.logprobs(refs[0])

    with pytest.raises(FleetFailed, match=r"^reference0\.1 died: killed by SIGKILL\. Resume with: asyncrl run x$"):
        asyncio.run(life())


async def _are_the_logprobs_of_one_rank(stored: list[BatchRef], parts: list[list[TrainRow]], model: Path) -> None:
    one = load_causal_model(model, "cpu")
    hello = RunFacts("x", Path(), Path(), 0, "", config_of()).hello("t", 0, "t")
    async with RowReader(InprocWire(), hello) as reader:
        for refs, rows in zip(stored, parts, strict=True):
            found = await reader.read(refs, ["reference_logprobs"])
            expected = frozen_logprobs(one, rows, 1024)
            for own, other in zip(found["reference_logprobs"], expected, strict=True):
                np.testing.assert_allclose(own, other, atol=1e-5)


def scores_of_one_rank(parts: list[list[TrainRow]], reads: str, judge: Path) -> list[list[float]]:
    one = load_score_model(judge, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(judge)

    def ids(row: TrainRow) -> np.ndarray:
        if reads == "tokens":
            return np.concatenate([row.prompt_ids, row.response_ids])
        talk = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": text_of(row)}]
        return np.array(tokenizer(tokenizer.apply_chat_template(talk, tokenize=False))["input_ids"])

    return [[one.scores([ids(each)]).item() for each in rows] for rows in parts]
