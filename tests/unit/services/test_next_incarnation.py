"""The generation service, when another trainer takes over from a checkpoint while it stays."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.errors import Refused
from asyncrl.lanes.bound_socket import on_tcp
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.weights.arena import open_writer
from asyncrl.lanes.weights.slot_memory import spec_of
from asyncrl.lanes.weights.transports.transport_ends import WeightNetwork, open_sender
from asyncrl.protocols.batch import BatchRef
from tests.unit.services import test_generation
from tests.unit.services.running_generation import core_of, until
from tests.unit.services.test_generation import INCARNATION, Start, collect, group, responses

arena = test_generation.arena
config = test_generation.config
folder = test_generation.folder
start = test_generation.start


async def test_in_the_next_incarnation_only_the_engine_is_the_same(start: Start, arena: Any, folder: Path) -> None:
    """Rows, requests and weights of the one before are gone; the same group samples what a new worker samples."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    successor = open_writer(f"test-{uuid4().hex[:8]}", spec_of(model, "float32"), "inproc")
    weights = dict(model.named_parameters(remove_duplicate=False))
    async with start() as service:
        await service.use_weights(arena.publish(7))
        rows = BatchRef.join(await collect(service, group(0)))
        running = asyncio.ensure_future(collect(service, group(1, members=9)))
        core = core_of(service)
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


async def test_weights_that_came_over_a_network_come_from_the_next_trainer(start: Start, folder: Path) -> None:
    """The trainers publish the same version of other weights: what is sampled is by the second one's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = dict(model.named_parameters(remove_duplicate=False))
    spec = spec_of(model, "float32")
    async with start(own_version=5) as fresh:
        expected = responses(fresh, await collect(fresh, group(1)))
    with closing(ZmqWire(CurveKeys.fresh())) as wire:
        async with start() as service, asyncio.TaskGroup() as tasks:
            service.context.reader.wire = wire
            network = WeightNetwork(wire, on_tcp("127.0.0.1", "*"), service.context.spec.hello, tasks)
            first, second = (open_sender("tcp", "", spec, lambda: network, folder) for _ in range(2))
            with torch.no_grad():
                moved = {name: value + 0.1 for name, value in weights.items()}
            await service.use_weights(await asyncio.to_thread(first.write, INCARNATION, 5, moved))
            assert responses(service, await collect(service, group(1))) != expected
            await service.renew(service.context.facts.renewed(INCARNATION + 1, folder))
            first.close()
            await service.use_weights(await asyncio.to_thread(second.write, INCARNATION + 1, 5, weights))
            again = await collect(service, group(1, incarnation=INCARNATION + 1))
            assert responses(service, again) == expected
            second.close()
