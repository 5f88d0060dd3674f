import asyncio
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from asyncrl.config.schema import Config, ModelConfig, TaskConfig
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.fleet.worker.worker_runtime import run_worker
from asyncrl.fleet.worker.worker_spec import Addresses, RunFacts, WorkerSpec
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.protocols.rank_layout import Layout


def test_a_specification_survives_its_line_of_json() -> None:
    config = Config(model=ModelConfig(name="m"), task=TaskConfig(prompts="p"), seed=7)
    facts = RunFacts(
        "feedbeef", Path("/run"), Path("/model"), 2, "arena", config, Path("/checkpoint"), ("public", "secret")
    )
    spec = WorkerSpec(
        service="training",
        replica=0,
        rank=3,
        layout=Layout(pp=2, tp=2, dp=2),
        instance="training0.3-2-0a0b0c0d",
        implementation="asyncrl.services.training:TrainingService",
        addresses=Addresses("ipc:///a", "ipc:///b", "ipc:///c"),
        facts=facts,
        options={"depth": [1, 2]},
    )
    spec = replace(spec, guest=replace(spec, service="generation", instance="generation3.0-2-0a0b0c0e"))
    line = spec.to_json()
    assert "\n" not in line
    assert WorkerSpec.from_json(line) == spec


def test_a_worker_reads_its_own_device_where_its_service_has_several() -> None:
    pools = {"gpus": {"devices": ["cuda:0", "cuda:1", "cuda:2"]}}
    values = {"model": {"name": "m"}, "task": {"prompts": "p"}, "pools": pools}
    config = Config.model_validate({**values, "generation": {"pool": "gpus", "replicas": 3}})
    facts = RunFacts("feedbeef", Path("/run"), Path("/model"), 2, "arena", config)
    here = Addresses("a", "b", "c")
    for service, device in (("generation", "cuda:2"), ("evaluation", "cuda:2"), ("training", "cpu")):
        devices = ("cuda:2",) if service != "training" else ()
        spec = WorkerSpec(service, 2, 0, Layout(), "x", "x:Y", here, facts, devices=devices)
        own = WorkerSpec.from_json(spec.to_json()).on_own_device().facts.config
        section = own.training if service == "training" else own.generation
        assert section.device == device
        assert own.generation.replicas == 3


class _Made(Exception):
    """Ends the worker once its service was made."""


async def test_a_service_finds_the_device_of_its_worker_in_its_config(tmp_path: Path) -> None:
    found: list[str] = []

    def make(context: WorkerContext) -> NoReturn:
        found.append(context.config.reference.device)
        raise _Made

    config = Config(model=ModelConfig(name="m"), task=TaskConfig(prompts="p"))
    facts = RunFacts("feedbeef", tmp_path, tmp_path, 0, "none", config)
    here = Addresses("inproc://control", "inproc://work", "inproc://data")
    spec = WorkerSpec("reference", 1, 0, Layout(), "reference1.0-0-1", make, here, facts, devices=("cuda:1",))
    wire = InprocWire()
    with pytest.RaisesGroup(_Made):
        await run_worker(spec, wire, asyncio.Event())
    wire.close()
    assert found == ["cuda:1"]
