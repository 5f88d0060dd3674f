"""What asyncrl adds to vLLM's processes: weights from the arena, and an end with the worker."""

import importlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.sections.training_config import LoraConfig
from asyncrl.engines.generation.vllm.vllm_generation import ATTACHED
from asyncrl.engines.generation.vllm.worker_extension import ArenaWeights, PolicyModel, WorkerExtension, weights_spec
from asyncrl.engines.models.lora import (
    attach,
    fill_for_probe,
    merge_adapters,
    published_spec,
    published_tensors,
    write_adapters,
)
from asyncrl.lanes.weights.arena import Writer, open_writer
from asyncrl.lanes.weights.slot_memory import spec_of
from tests.unit.lanes.weights.transports.cuda_twin import TwinCuda

PATIENCE = 60.0
TRANSFER = "asyncrl.engines.generation.vllm.arena_transfer"
WATCH = """
import os, sys, time
from asyncrl.engines.generation.vllm.worker_extension import end_with
end_with(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(600)
"""
OWNER = f"""
import os, subprocess, sys
middle = "import subprocess, sys, time; subprocess.run([sys.executable, '-c', *sys.argv[1:]]); time.sleep(600)"
subprocess.run([sys.executable, "-c", middle, {WATCH!r}, str(os.getpid())])
"""


class Worker(WorkerExtension):
    """The method of vLLM's worker that the extension calls."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    def reload_weights(self, weights_iterator: Any) -> None:
        self.loaded = {name: tensor.clone() for name, tensor in weights_iterator}


class Model(Worker):
    """The methods and functions of vLLM that the transfer to GPUs calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[str]()

    def load_weights(self, weights: Any) -> None:
        self.calls.append("load")
        self.reload_weights(weights)


@pytest.fixture
def arena_transfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, over a stand-in for the modules of vLLM that it imports."""
    engine = type("WeightTransferEngine", (), {"__class_getitem__": classmethod(lambda cls, _: cls)})
    base = SimpleNamespace(WeightTransferEngine=engine, WeightTransferInitInfo=object, WeightTransferUpdateInfo=object)
    reload = SimpleNamespace(
        initialize_layerwise_reload=lambda model: model.calls.append("initialize"),
        finalize_layerwise_reload=lambda model, config: model.calls.append(f"finalize with {config}"),
    )
    modules = {"vllm.distributed.weight_transfer.base": base, "vllm.model_executor.model_loader.reload": reload}
    for name in [".".join(parts[:end]) for parts in (name.split(".") for name in modules) for end in range(1, 5)]:
        monkeypatch.setitem(sys.modules, name, modules.get(name, ModuleType(name)))
    monkeypatch.delitem(sys.modules, TRANSFER, raising=False)
    found = importlib.import_module(TRANSFER)
    yield found
    monkeypatch.delitem(sys.modules, TRANSFER)


def test_weights_come_from_the_arena_under_every_name(model_folder: Callable[[str], Path], arena_transfer: Any) -> None:
    """Tied embeddings come under both names, to vLLM's reload on CPUs and to its update on GPUs."""
    folder = model_folder("llama-tied")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert weights_spec(PolicyModel(folder, "float32", None)) == spec_of(model, "float32")
    with closing(open_writer(f"asyncrl-{uuid4().hex[:8]}-weights", spec_of(model, "float32"), "ipc")) as writer:
        published = writer.write(1, 5, dict(model.named_parameters(remove_duplicate=False)))
        fields = [getattr(published, name) for name in ATTACHED]
        worker = Worker()
        plain = [str(folder), "float32", None]
        assert worker.asyncrl_attach(plain, fields) == ""
        with pytest.raises(AssertionError, match="version 5 was attached"):
            worker.asyncrl_load(6)
        worker.asyncrl_load(5)
        assert worker.loaded.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
        assert torch.equal(worker.loaded["lm_head.weight"], model.model.embed_tokens.weight)
        damaged = [*fields[:4], "00000000", fields[5]]
        assert worker.asyncrl_attach(plain, damaged).startswith("WeightsError: weights of version 5")
        gone = [*fields[:2], "shm://asyncrl-gone-weights", *fields[3:]]
        assert worker.asyncrl_attach(plain, gone).startswith("PeerLost: ")
        with pytest.raises(AssertionError, match="attach comes first"):
            worker.asyncrl_load(5)
        transfer = arena_transfer.ArenaTransfer()
        model_of_vllm = Model()
        transfer.model, transfer.model_config, transfer.device = model_of_vllm, "its config", torch.device("cpu")
        assert worker.asyncrl_attach(plain, fields) == ""
        transfer.start_weight_update()
        transfer.receive_weights(arena_transfer.Version(5))
        transfer.finish_weight_update()
        assert model_of_vllm.calls == ["initialize", "load", "finalize with its config"]
        assert model_of_vllm.loaded.keys() == worker.loaded.keys()


LORAS = [LoraConfig(rank=4, alpha=6.0), LoraConfig(rank=2, targets=("v_proj", "layers.1.mlp.up_proj"))]


@pytest.mark.parametrize("lora", LORAS, ids=["all", "two"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_come_merged_into_the_base_model(
    lora: LoraConfig, dtype: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """From the arena and from a folder of peft, with tied embeddings under both names."""
    folder = model_folder("llama-tied")
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    attach(trained, lora, seed=5)
    fill_for_probe(trained)
    spec = published_spec(trained, dtype)
    assert weights_spec(PolicyModel(folder, dtype, lora)) == spec
    described = [str(folder), dtype, lora.model_dump()]
    workers = [Worker(), Worker()]
    with closing(open_writer(f"asyncrl-{uuid4().hex[:8]}-weights", spec, "ipc")) as writer:
        published = writer.write(1, 5, published_tensors(trained))
        assert workers[0].asyncrl_attach(described, [getattr(published, name) for name in ATTACHED]) == ""
        workers[0].asyncrl_load(5)
    write_adapters(tmp_path, trained, lora, str(folder))
    workers[1].asyncrl_attach_saved(described, str(tmp_path), 5)
    workers[1].asyncrl_load(5)
    merge_adapters(trained)
    expected = dict(trained.named_parameters(remove_duplicate=False))
    for worker in workers:
        assert worker.loaded.keys() == expected.keys()
        for name, tensor in worker.loaded.items():
            assert tensor.dtype == getattr(torch, dtype)
            exact = {"float32": 1e-6, "bfloat16": 1e-2}[dtype]
            torch.testing.assert_close(tensor.float(), expected[name].detach(), atol=exact, rtol=exact)


def test_an_arena_is_registered_once_for_a_device_and_until_the_next_arena(
    model_folder: Callable[[str], Path],
) -> None:
    folder = model_folder("llama-tied")
    cuda = TwinCuda()
    devices = list[str]()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    named = dict(model.named_parameters(remove_duplicate=False))

    def open_twin(device: str) -> TwinCuda:
        devices.append(device)
        return cuda

    arena = ArenaWeights(open_twin)
    policy = PolicyModel(folder, "float32", None)

    def take(writer: Writer, version: int, device: str) -> None:
        published = writer.write(1, version, named)
        assert arena.attach(policy, [getattr(published, name) for name in ATTACHED]) == ""
        with arena.taken(version, torch.device(device)):
            pass

    with ExitStack() as opened:
        writers = [
            opened.enter_context(
                closing(open_writer(f"asyncrl-{uuid4().hex[:8]}-weights", spec_of(model, "float32"), "ipc"))
            )
            for _ in range(2)
        ]
        take(writers[0], 0, "cpu")
        assert not devices
        take(writers[0], 1, "cuda:1")
        take(writers[0], 2, "cuda:1")
        assert devices == ["cuda:1"]
        take(writers[1], 3, "cuda:1")
        assert len(devices) == 2
        assert len(cuda.registered) == 1
        arena.close()
        assert not cuda.registered


def test_a_base_model_without_safetensors_is_refused(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(model_folder("llama-tied"), tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    described = [str(tmp_path / "model"), "float32", LORAS[0].model_dump()]
    refused = Worker().asyncrl_attach(described, [1, 5, "shm://asyncrl-gone-weights", 1, "", ""])
    assert refused.startswith("WeightsError: model.lora with vLLM reads the base model from safetensors")


def test_processes_of_vllm_die_with_the_worker_that_started_them() -> None:
    """The worker is killed by SIGKILL; a process between it and the one that watches is killed as well."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner.stdout as output:
        watching = int(output.readline())
        between = int(Path(f"/proc/{watching}/stat").read_text().rpartition(")")[2].split()[1])
        descriptors = [os.pidfd_open(pid) for pid in (watching, between)]
        owner.kill()
        owner.wait(PATIENCE)
        for descriptor in descriptors:
            assert select.select([descriptor], [], [], PATIENCE)[0]
            os.close(descriptor)


def test_a_process_whose_worker_is_dead_already_ends_itself() -> None:
    other = subprocess.Popen(["sleep", "600"])
    done = subprocess.run([sys.executable, "-c", WATCH, str(other.pid)], check=False, timeout=PATIENCE)
    other.kill()
    other.wait(PATIENCE)
    assert done.returncode == -signal.SIGKILL
