"""What the tests of all services build on: a worker's context, without a worker."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from asyncrl.config.schema import Config
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.fleet.worker.worker_spec import Addresses, RunFacts, WorkerSpec
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column
from asyncrl.protocols.rank_layout import Layout
from asyncrl.telemetry.state_clock import Occupancy, StateClock
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
        self.store = store
        self.reads = 0
        self.bytes_read = 0

    async def read(self, refs: BatchRef, columns: Sequence[str]) -> Batch:
        async with self.views(refs, columns) as found:
            return Batch({name: Column.of(rows) for name, rows in found.items()})

    @asynccontextmanager
    async def views(self, refs: BatchRef, columns: Sequence[str]) -> AsyncIterator[dict[str, list[Array]]]:
        self.reads += 1
        rows = [self.store.read(ref.place_of(columns[0]), columns) for ref in refs]
        yield {name: [row[i] for row in rows] for i, name in enumerate(columns)}


class InlineCompute(ThreadCompute):
    """Computes at once, on the event loop."""

    async def run(self, function: Any, *args: Any) -> Any:
        return self._booked(function, *args)


@pytest.fixture
def worker_context(tmp_path: Path) -> Callable[..., WorkerContext]:
    """Makes contexts. source: the rows its reader reads; its own go to a store of its own. changes: fields of facts,
    specification or context."""

    def make(
        service: str,
        config: Config,
        tasks: asyncio.TaskGroup,
        *,
        incarnation: int = 1,
        source: RowStore | None = None,
        make_compute: Callable[[Occupancy], ThreadCompute] = InlineCompute,
        **changes: Any,
    ) -> WorkerContext:
        clock = StateClock(asyncio.get_running_loop().time)
        occupancy = Occupancy(clock)
        facts = _changed(RunFacts("cafe0123", tmp_path, tmp_path, incarnation, "", config), changes)
        instance = f"{service}0.0-{incarnation}-12345678"
        spec = WorkerSpec(service, 0, 0, Layout(), instance, "none", Addresses.inproc(instance), facts)
        reader: Any = StoreReader(source or RowStore.private("inproc://source", 1, 1))
        context = WorkerContext(
            spec=_changed(spec, changes),
            reader=reader,
            compute=make_compute(occupancy),
            clock=clock,
            occupancy=occupancy,
            tracer=Tracer(None, service),
            log=structlog.get_logger(),
            tasks=tasks,
            open_rows=lambda slots, row_bytes: RowStore.private(f"inproc://{service}.data", slots, row_bytes),
        )
        context = _changed(context, changes)
        assert not changes, f"nothing has these fields: {changes}"
        return context

    return make


def _changed(record: Any, changes: dict[str, Any]) -> Any:
    """Takes the changes of this record's fields out of `changes`, and returns the changed record."""
    return replace(record, **{item.name: changes.pop(item.name) for item in fields(record) if item.name in changes})
