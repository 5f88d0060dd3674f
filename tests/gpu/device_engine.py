"""A torch engine on a device, what it is asked for, and plain forwards to compare it with.

`python -m tests.gpu.device_engine FOLDER DEVICE` is an engine in a process of its own: for each line of its input, an
order, it flips to a version in the trainer's device memory, runs steps and prints the samples that finished.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import Config
from asyncrl.engines.generation.engine_interface import NO_WEIGHTS, Completion, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.lanes.weights.slot_memory import DTYPES
from asyncrl.lanes.weights.transports.device_arena import CudaRuntime, CupyRuntime, open_device_reader
from asyncrl.protocols.messages import Published
from tests.unit.lanes.weights.transports.cuda_twin import TwinCuda

KNOWN = 261
"""Ids of the tokenizer of tests.unit.engines.generation.conftest."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}


def engine_config(device: str, dtype: str = "float32", lora: dict[str, Any] | None = None, **settings: Any) -> Config:
    """The config of an engine and a trainer of the same dtype. settings: of generation."""
    return Config.model_validate(
        {
            "model": {"name": "tiny", "dtype": dtype, "lora": lora},
            "task": {"prompts": "none", "max_prompt_tokens": 40},
            "training": {"device": device, "precision": dtype, "learning_rate": 1e-3},
            "generation": {"slots": 12, "max_new_tokens": 24, "device": device} | settings,
            "steps": 4,
        }
    )


def requests(count: int = 12) -> list[SampleRequest]:
    random = np.random.default_rng(0)
    prompts = [random.integers(5, KNOWN, random.integers(1, 40)).astype(np.int32) for _ in range(count)]
    return [SampleRequest((number, 0, 0), prompt, number, 1.0, 24) for number, prompt in enumerate(prompts)]


def run_steps(engine: TorchEngine, steps: int = 10_000) -> list[Completion]:
    """Runs steps while there is something to sample."""
    done: list[Completion] = []
    while engine.active and steps > 0:
        done += engine.step()
        steps -= 1
    return done


def changed_models(folder: Path, device: str, dtype: str, count: int) -> list[Any]:
    """Models of one shape with weights of their own."""
    torch.manual_seed(3)
    found = [AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).to(device).eval() for _ in range(count)]
    with torch.no_grad():
        for model in found:
            for parameter in model.parameters():
                parameter += 0.05 * parameter.float().std().nan_to_num(0.0) * torch.randn_like(parameter)
    return found


def plain_logprobs(model: Any, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Log-probs of a sample's tokens by a forward of transformers."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64)).to(model.device)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1, :KNOWN].float()
    return logits.log_softmax(-1).gather(-1, ids[len(prompt) :, None])[:, 0].cpu().numpy()


def check_versions(done: Iterable[Completion], models: list[Any], *, recomputed: bool, within: float) -> int:
    """Compares each token with a forward by the weights that sampled it; where keys of older weights were kept, only
    tokens of the version that a sample began with. Returns how many samples have tokens of several versions."""
    spanning = 0
    for completion in done:
        versions = completion.versions
        prompt = completion.request.prompt
        tokens = completion.tokens
        assert (np.diff(versions) >= 0).all()
        spanning += versions[0] != versions[-1]
        for version in set(versions.tolist()) if recomputed else {int(versions[0])}:
            own = versions == version
            expected = plain_logprobs(models[version], prompt, tokens)[own]
            np.testing.assert_allclose(completion.logprobs[own], expected, atol=within, rtol=0)
    return spanning


@contextmanager
def cuda_of(device: str) -> Iterator[CudaRuntime]:
    """CUDA, or its twin on the CPU, whose memory ends with the block."""
    if device != "cpu":
        yield CupyRuntime("cuda:0")
        return
    twin = TwinCuda()
    try:
        yield twin
    finally:
        twin.end()


def main() -> None:
    folder = Path(sys.argv[1])
    device = sys.argv[2]
    with cuda_of(device) as cuda:
        answer_orders(folder, device, cuda)


def answer_orders(folder: Path, device: str, cuda: CudaRuntime) -> None:
    engine = TorchEngine(folder, engine_config(device, kv="recompute"), NO_WEIGHTS)
    engine.submit(*requests())
    reader = None
    for line in sys.stdin:
        order = json.loads(line)
        published = Published(**order["published"])
        reader = reader or open_device_reader(published, engine.spec, cuda)
        tensors = reader.tensors(published)
        engine.load(tensors, published.version, share=True)
        reader.check(published)
        in_place = all(
            engine._flat.model.get_parameter(each.name).data_ptr() == tensors[each.name].data_ptr()
            for each in engine.spec.tensors
        )
        done = [
            {"number": c.request.key[0], "tokens": c.tokens, "logprobs": c.logprobs, "versions": c.versions}
            for c in run_steps(engine, order["steps"])
        ]
        sys.stdout.write(json.dumps({"in_place": in_place, "done": done}, default=np.ndarray.tolist) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
