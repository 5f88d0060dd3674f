"""What the tests of all services build on: a worker's context, without a worker."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from asyncrl.config.schema import Config
from asyncrl.fleet.worker.compute_thread import Compute, InlineCompute, Occupancy
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column
from asyncrl.protocols.layout import Layout
from asyncrl.telemetry.state_clock import StateClock
from asyncrl.telemetry.trace import Tracer

VOCABULARY = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and a tokenizer of as many words as it has tokens."""
    torch.manual_seed(2)
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


class StoreReader:
    """Reads from one store of this process, and counts how often."""

    def __init__(self, store: RowStore) -> None:
        self.store, self.reads = store, 0

    async def read(self, refs: BatchRef, columns: Sequence[str]) -> Batch:
        async with self.views(refs, columns) as found:
            return Batch({name: Column.of(rows) for name, rows in found.items()})

    @asynccontextmanager
    async def views(self, refs: BatchRef, columns: Sequence[str]) -> AsyncIterator[dict[str, list[Array]]]:
        self.reads += 1
        rows = [self.store.read(ref.place_of(columns[0]), columns) for ref in refs]
        yield {name: [row[i] for row in rows] for i, name in enumerate(columns)}


@pytest.fixture
def worker_context(tmp_path: Path) -> Callable[..., WorkerContext]:
    """Makes contexts. source: the rows its reader reads; its own go to a store of its own."""

    def make(
        service: str,
        config: Config,
        tasks: asyncio.TaskGroup,
        *,
        incarnation: int = 1,
        source: RowStore | None = None,
        make_compute: Callable[[Occupancy], Compute] = InlineCompute,
        **changes: Any,
    ) -> WorkerContext:
        clock = StateClock(asyncio.get_running_loop().time)
        occupancy = Occupancy(clock)
        values: dict[str, Any] = {
            "run": "cafe0123",
            "run_dir": tmp_path,
            "model_dir": tmp_path,
            "checkpoint_dir": None,
            "replica": 0,
            "rank": 0,
            "layout": Layout(),
            "instance": f"{service}0.0-{incarnation}-12345678",
            "weights_arena": "",
            "reader": StoreReader(source or RowStore.private("inproc://source", 1, 1)),
            "compute": make_compute(occupancy),
            "tracer": Tracer(None, service),
            "log": structlog.get_logger(),
            "open_rows": lambda slots, slot_bytes: RowStore.private(f"inproc://{service}.data", slots, slot_bytes),
        }
        parts = {"service": service, "config": config, "tasks": tasks, "incarnation": incarnation}
        return WorkerContext(**parts, clock=clock, occupancy=occupancy, **values | changes)

    return make
