"""What the tests of all services build on: a worker's context, without a worker."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from asyncrl.config.schema import Config
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.fleet.worker.worker_spec import Addresses, RunFacts, WorkerSpec
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column, RowRef
from asyncrl.protocols.rank_layout import Layout
from asyncrl.telemetry.state_clock import Occupancy, StateClock
from asyncrl.telemetry.trace import Tracer

VOCABULARY = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and a tokenizer of as many words as it has tokens."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
        reader: Any = StoreReader(source or RowStore.private("inproc://source", 64, 4096))
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


class _Ended(Exception):
    """Cancels what a service does beside calls."""


Serve = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture
def serve(worker_context: Callable[..., WorkerContext]) -> Serve:
    """serve(make, name, config, **changes): starts a service for a block, which gets it. make: its class. changes: of
    its context, as in worker_context."""

    @asynccontextmanager
    async def run(
        make: Callable[[WorkerContext], Service], name: str, config: Config, **changes: Any
    ) -> AsyncIterator[Service]:
        with ExitStack() as scope:
            try:
                async with asyncio.TaskGroup() as tasks:
                    service = make(worker_context(name, config, tasks, **changes))
                    scope.callback(service.context.compute.close)
                    try:
                        await service.begin()
                        await service.started()
                        yield service
                    finally:
                        await service.stop()
                    raise _Ended
            except* _Ended:
                pass

    return run


@pytest.fixture
def mine(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file of the user with the FUNCTIONS of the test's module."""
    file = tmp_path / "mine.py"
    file.write_text(request.module.FUNCTIONS)
    return str(file)


def store_read_by(service: Service) -> RowStore:
    """Returns the store that a service reads."""
    reader: Any = service.context.reader
    store: RowStore = reader.store
    return store


def put_row(
    store: RowStore, *, group: int = 4, member: int = 0, text: str | None = None, finish: str = "stop", **columns: Any
) -> RowRef:
    """Stores the row of a sample of incarnation 1, with these columns, lists of token ids among them."""
    for name in ("prompt_ids", "response_ids", "spans"):
        if name in columns:
            columns[name] = np.asarray(columns[name], np.int32)
    if text is not None:
        columns["text"] = np.frombuffer(text.encode(), np.uint8)
    tokens = len(columns.get("response_ids", text or ()))
    place = store.put(columns)
    return RowRef(group, member, 0, 1, len(columns.get("prompt_ids", ())), tokens, 0, 0, finish, (place,))


def _changed(record: Any, changes: dict[str, Any]) -> Any:
    """Takes the changes of this record's fields out of `changes`, and returns the changed record."""
    return replace(record, **{item.name: changes.pop(item.name) for item in fields(record) if item.name in changes})
