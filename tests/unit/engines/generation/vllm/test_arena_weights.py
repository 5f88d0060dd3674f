"""A process of vLLM registers the trainer's arena when it first copies from it to a device."""

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import torch
from transformers import AutoModelForCausalLM

from asyncrl.engines.generation.vllm.worker_extension import ArenaWeights, PolicyModel
from asyncrl.lanes.weights.arena import Writer, open_writer
from asyncrl.lanes.weights.slot_memory import spec_of
from tests.unit.lanes.weights.transports.cuda_twin import TwinCuda


def test_an_arena_is_registered_once_for_a_device_and_until_the_next_arena(
    model_folder: Callable[[str], Path],
) -> None:
    folder = model_folder("llama-tied")
    cuda = TwinCuda()
    devices = list[str]()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    named = dict(model.named_parameters(remove_duplicate=False))
    writers: list[Writer] = []

    def open_twin(device: str) -> TwinCuda:
        devices.append(device)
        return cuda

    arena = ArenaWeights(open_twin)
    policy = PolicyModel(folder, "float32", None)

    def take(writer: Writer, version: int, device: str) -> None:
        published = writer.write(1, version, named)
        fields = [
            getattr(published, name) for name in ("incarnation", "version", "arena", "slot", "digest", "digest_of")
        ]
        assert arena.attach(policy, fields) == ""
        with arena.taken(version, torch.device(device)):
            pass

    try:
        for _ in range(2):
            writers.append(open_writer(f"asyncrl-{uuid4().hex[:8]}-weights", spec_of(model, "float32"), "ipc"))
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
    finally:
        for writer in writers:
            writer.close()
