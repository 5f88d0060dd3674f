"""The generation service, when another trainer takes over from a checkpoint while it stays."""

import asyncio
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.errors import Refused
from asyncrl.lanes.weights.arena import open_writer
from asyncrl.lanes.weights.tensor_spec import spec_of
from asyncrl.protocols.batch import BatchRef
from tests.unit.services import test_generation
from tests.unit.services.running_generation import core_of, until
from tests.unit.services.test_generation import INCARNATION, Start, collect, group, responses

arena, config, folder, start = (
    test_generation.arena,
    test_generation.config,
    test_generation.folder,
    test_generation.start,
)


async def test_in_the_next_incarnation_only_the_engine_is_the_same(start: Start, arena: Any, folder: Path) -> None:
    """Rows, requests and weights of the one before are gone; the same group samples what a new worker samples."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    successor = open_writer(f"test-{uuid4().hex[:8]}", spec_of(model, "float32"), "inproc")
    weights = dict(model.named_parameters(remove_duplicate=False))
    async with start() as service:
        await service.use_weights(arena.publish(7))
        rows = BatchRef.join(await collect(service, group(0)))
        running, core = asyncio.ensure_future(collect(service, group(1, members=9))), core_of(service)
        await until(service, lambda: core.running > 0)
        running.cancel()
        await asyncio.wait([running])
        await service.renew(service.context.facts.renewed(INCARNATION + 1, folder))
        assert (core.running, core.waiting, core.cache_used, service.rows.used) == (0, 0, 0.0, 0)
        assert (service.weights_version, await service.texts(rows)) == (None, [])
        with pytest.raises(Refused, match=r"group 0 has incarnation 2"):
            await collect(service, group(0))
        again = asyncio.ensure_future(collect(service, group(1, incarnation=INCARNATION + 1)))
        await until(service, lambda: core.waiting > 0)
        assert core.running == 0, "the weights of the trainer that died sample nothing"
        await service.use_weights(successor.write(INCARNATION + 1, 5, weights))
        found = await again
        assert {(row.incarnation, row.first) for ref in found for row in ref} == {(INCARNATION + 1, 5)}
        sampled = responses(service, found)
    async with start(own_version=5) as fresh:
        assert responses(fresh, await collect(fresh, group(1))) == sampled
    successor.close()
