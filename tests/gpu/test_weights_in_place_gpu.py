"""The torch engine reads weights where they are on the device, and flips between two steps of running samples."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch

from asyncrl.engines.generation.engine_interface import NO_WEIGHTS
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.lanes.weights.slot_memory import new_block, spec_of, views, with_aliases
from asyncrl.lanes.weights.transports.device_arena import CudaRuntime, open_device_writer
from tests.gpu.device_engine import (
    TOLERANCE,
    changed_models,
    check_versions,
    cuda_of,
    engine_config,
    requests,
    run_steps,
)
from tests.unit.engines.generation.conftest import model_folder as model_folder

STEPS = 6
"""Decode steps between two versions."""

DEADLINE = 110.0
ROOT = Path(__file__).parents[2]
ModelFolder = Callable[[str], Path]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_running_samples_flip_between_two_slots_of_the_device(
    device: str, kv: str, dtype: str, model_folder: ModelFolder
) -> None:
    """Three versions in two slots: the third overwrites what the first was read from."""
    folder = model_folder("llama-tied")
    engine = TorchEngine(folder, engine_config(device, dtype, kv=kv), NO_WEIGHTS)
    models = changed_models(folder, device, dtype, 3)
    slots = [with_aliases(views(new_block(engine.spec, device), engine.spec), engine.spec) for _ in range(2)]
    engine.submit(*requests())
    done = []
    for version, model in enumerate(models):
        slot = slots[version % 2]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                slot[name].copy_(parameter)
        engine.load(slot, version, share=True)
        assert engine._flat.model.lm_head.weight.data_ptr() == slot["lm_head.weight"].data_ptr()
        assert engine._flat.model.lm_head.weight.device.type == device
        done += run_steps(engine, STEPS if version < 2 else 10_000)
    assert len(done) == len(requests())
    assert check_versions(done, models, recomputed=kv == "recompute", within=TOLERANCE[dtype]) > 6


@pytest.fixture
def cuda(device: str) -> Iterator[CudaRuntime]:
    with cuda_of(device) as found:
        yield found


def test_an_engine_in_another_process_flips_in_the_memory_of_the_trainer(
    device: str, model_folder: ModelFolder, cuda: CudaRuntime
) -> None:
    """Nothing is copied: parameters of the engine are views of what the trainer allocated."""
    folder = model_folder("llama-tied")
    models = changed_models(folder, device, "float32", 3)
    writer = open_device_writer(f"asyncrl-test-{uuid4().hex[:12]}", spec_of(models[0], "float32"), cuda)
    command = [sys.executable, "-m", "tests.gpu.device_engine", str(folder), device]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    found: list[dict[str, Any]] = []
    try:
        for version, model in enumerate(models):
            published = writer.write(0, version, dict(model.named_parameters(remove_duplicate=False)))
            fields = {name: value for name, value in asdict(published).items() if name not in ("readers", "canary")}
            order = {"published": fields, "steps": STEPS if version < 2 else 10_000}
            print(json.dumps(order), file=engine.stdin, flush=True)
            answer = json.loads(engine.stdout.readline())
            assert answer["in_place"]
            found += answer["done"]
    finally:
        engine.kill()
        engine.communicate(timeout=DEADLINE)
        writer.close()
    asked = {request.key[0]: request for request in requests()}
    done = [
        SimpleNamespace(
            request=replace(asked[each["number"]]),
            **{name: np.array(each[name]) for name in ("tokens", "logprobs", "versions")},
        )
        for each in found
    ]
    assert len(done) == len(asked)
    assert check_versions(done, models, recomputed=True, within=TOLERANCE["float32"]) > 6
