"""The torch generation engine on a CUDA device: recorded log-probs are the plain forward's, before and after a swap."""

from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from asyncrl.config.schema import Config
from asyncrl.engines.generation.engine_interface import Completion, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer
from asyncrl.lanes.weights.arena import open_reader, open_writer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    tokenizer = build_tokenizer(("left", "right"))
    target = tmp_path_factory.mktemp("model")
    build_model(tokenizer).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def make_engine(folder: Path, device: str, dtype: str = "float32", **generation: object) -> TorchEngine:
    sections = {
        "model": {"name": "tiny", "dtype": dtype},
        "task": {"prompts": "none", "max_prompt_tokens": 40},
        "generation": {"slots": 24, "max_new_tokens": 32, "device": device} | generation,
    }
    return TorchEngine(folder, Config.model_validate(sections), version=0)


def requests(count: int) -> list[SampleRequest]:
    random = np.random.default_rng(0)
    prompts = [random.integers(4, 90, random.integers(1, 40)).astype(np.int32) for _ in range(count)]
    return [SampleRequest((number, 0, 0), prompt, number, 1.0, 32) for number, prompt in enumerate(prompts)]


def drain(engine: TorchEngine, wanted: list[SampleRequest], steps: int = 10_000) -> list[Completion]:
    for request in wanted:
        engine.submit(request)
    done: list[Completion] = []
    while engine.active and steps > 0:
        done += engine.step()
        steps -= 1
    return done


def plain(model: LlamaForCausalLM, completion: Completion) -> np.ndarray:
    prompt = completion.request.prompt
    ids = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64)).to(model.device)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[len(prompt) :, None])[:, 0].cpu().numpy()


@pytest.mark.parametrize("deterministic", [False, True])
def test_logprobs_equal_a_plain_forward(device: str, folder: Path, deterministic: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    done = drain(make_engine(folder, device, deterministic=deterministic), requests(60))
    assert len(done) == 60
    for completion in done:
        np.testing.assert_allclose(completion.logprobs, plain(model, completion), atol=1e-4, rtol=0)


def test_tokens_are_those_of_the_cpu(device: str, folder: Path) -> None:
    """fp32 on both: the same draws pick the same tokens but where a draw falls on a rounding error."""
    on_gpu = {c.request.key: c for c in drain(make_engine(folder, device), requests(40))}
    on_cpu = {c.request.key: c for c in drain(make_engine(folder, "cpu"), requests(40))}
    same = sum(on_gpu[key].tokens.tolist() == on_cpu[key].tokens.tolist() for key in on_cpu)
    assert same >= 38


def test_bfloat16_stays_near_its_plain_forward(device: str, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    for completion in drain(make_engine(folder, device, dtype="bfloat16"), requests(24)):
        np.testing.assert_allclose(completion.logprobs, plain(model, completion), atol=0.3, rtol=0)


def test_weights_are_copied_out_of_the_arena_between_two_steps(device: str, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    old = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    engine = make_engine(folder, device, kv="recompute")
    writer = open_writer(f"test-{uuid4().hex[:8]}", engine.spec, "inproc")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * parameter.std().nan_to_num(0.0) * torch.randn_like(parameter)
    published = writer.write(0, 1, dict(model.named_parameters(remove_duplicate=False)))
    done = drain(engine, requests(24), steps=6)
    engine.load(open_reader(published, engine.spec).tensors(published), 1, share=False)
    done += drain(engine, [])
    spanning = 0
    for completion in done:
        before = completion.versions == 0
        spanning += 0 < int(before.sum()) < len(before)
        expected = np.where(before, plain(old, completion), plain(model, completion))
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)
    assert spanning > 10
    writer.close()
