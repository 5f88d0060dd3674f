"""The trainer saves rows of waiting samples beside its checkpoint, and generation stores them again."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.data.row_file import READY_ROWS
from asyncrl.lanes.data.row_store import RowStore, bytes_of_row
from asyncrl.protocols.batch import (
    Batch,
    BatchRef,
    Column,
    RowRef,
    restored_columns,
    sample_columns,
    trajectory_columns,
    value_columns,
)
from asyncrl.services.generation import GenerationService
from tests.power_cut_disk import Disk
from tests.unit.services.counting import INCARNATION, CountingService, config, context_maker

Contexts = Callable[..., WorkerContext]
SAMPLES = 3
TOKENS = 12
LONGEST = (4, TOKENS, 5 * TOKENS)
VALUED = value_columns("values", "valued_at", TOKENS) | value_columns("cost_values", "cost_valued_at", TOKENS)

EPISODE = trajectory_columns(2, 50)


class Stores:
    """Reads out of several stores of this process."""

    def __init__(self, *stores: RowStore) -> None:
        self.stores = {store.address: store for store in stores}

    async def read(self, refs: BatchRef, columns: list[str]) -> Batch:
        places = {name: [row.place_of(name) for row in refs] for name in columns}
        rows = {name: [self.stores[at.owner].read(at, [name])[0] for at in each] for name, each in places.items()}
        return Batch({name: Column.of(each) for name, each in rows.items()})


def put(generation: RowStore, critics: RowStore) -> BatchRef:
    """Returns samples whose rows, at two services, are as long as any can be."""
    rows = []
    for member in range(SAMPLES):
        columns = sample_columns(*LONGEST) | EPISODE
        own = {name: np.full(length, member, dtype) for name, (dtype, length) in columns.items()}
        values = {name: np.full(length, member, dtype) for name, (dtype, length) in VALUED.items()}
        values["reference_logprobs"] = values["token_rewards"] = np.full(TOKENS, member, np.float32)
        places = (generation.put(own), critics.put(values))
        rows.append(RowRef(4, member, 0, INCARNATION, 4, TOKENS, 0, 0, "stop", places, 1.0))
    return BatchRef(tuple(rows))


@pytest.mark.parametrize("is_copied", [False, True])
async def test_rows_with_the_columns_of_all_services_are_saved_and_stored_again(
    tmp_path: Path, worker_context: Contexts, monkeypatch: pytest.MonkeyPatch, is_copied: bool
) -> None:
    disk = Disk(monkeypatch)
    sampled, critics = (RowStore.private(f"inproc://{name}", 8, 4096) for name in ("sampled", "critics"))
    samples = put(sampled, critics)
    gone = samples.rows[1]
    critics.free(gone.places)
    async with asyncio.TaskGroup() as tasks:
        context = context_maker(worker_context)(tasks, tmp_path, reader=Stores(sampled, critics))
        made = await CountingService(context).save_rows(str(tmp_path), samples)
    assert made.files == {READY_ROWS: sha256((tmp_path / READY_ROWS).read_bytes()).hexdigest()}
    assert disk.has(tmp_path / READY_ROWS), "they outlive a power cut"
    assert made.ready == ((4, 0, 0), (4, 2, 0))

    async with asyncio.TaskGroup() as tasks:
        resumed: Any = worker_context("generation", config(), tasks, incarnation=INCARNATION + 1)
        service = GenerationService(resumed)
        longest = restored_columns(*LONGEST) | EPISODE
        service.rows = RowStore.private("inproc://again", 8, bytes_of_row(longest))
        if is_copied:  # The host of the worker does not see the folder that the controller names.
            facts = replace(resumed.facts, checkpoint_dir=tmp_path)
            service.context = replace(resumed, spec=replace(resumed.spec, facts=facts))
        found = await service.restore_rows("/elsewhere" if is_copied else str(tmp_path), samples)
        assert [(row.name, row.incarnation) for row in found] == [(name, INCARNATION + 1) for name in made.ready]
        for row in found:
            (place,) = row.places
            assert set(place.columns) == set(longest)
            assert all((values == row.member).all() for values in service.rows.read(place, place.columns))
        await service.release([row.name for row in found], oldest=0)
        assert service.rows.used == 0, "they are freed like rows that were sampled here"


async def test_other_ranks_than_the_first_save_nothing(tmp_path: Path, worker_context: Contexts) -> None:
    store = RowStore.private("inproc://sampled", 8, 4096)
    async with asyncio.TaskGroup() as tasks:
        context = context_maker(worker_context)(tasks, tmp_path, rank=1, source=store)
        made = await CountingService(context).save_rows(str(tmp_path), put(store, store))
    assert (made.files, made.ready) == ({}, ())
    assert not (tmp_path / READY_ROWS).exists()
