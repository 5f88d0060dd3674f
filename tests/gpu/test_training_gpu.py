"""The torch training engine on a CUDA device: the same log-probs, gradients and checkpoints as on the CPU."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from asyncrl.config.schema import Config
from asyncrl.engines.canary_logprobs import canary_distance
from asyncrl.engines.generation.engine_interface import SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step
from tests.unit.engines.generation.test_agreement_with_training import train_row

VOCABULARY = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    path = tmp_path_factory.mktemp("tiny")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


@pytest.fixture
def rows() -> list[TrainRow]:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 60, 32)
    return [
        TrainRow(
            group=index // 8,
            member=index % 8,
            attempt=0,
            incarnation=1,
            prompt_ids=draw.integers(0, VOCABULARY, int(draw.integers(2, 20))),
            response_ids=draw.integers(0, VOCABULARY, int(length)),
            logprobs=draw.normal(-6, 0.1, int(length)).astype(np.float32),
            versions=np.zeros(int(length), np.int64),
            advantage=float(draw.normal()),
        )
        for index, length in enumerate(lengths)
    ]


def engine(folder: Path, device: str, **training: object) -> PolicyTrainer:
    return PolicyTrainer(config(device, **training), folder)


def config(device: str, **training: object) -> Config:
    settings = {"device": device, "learning_rate": 1e-4, "micro_batch_tokens": 600, **training}
    return Config.model_validate({"model": {"name": "tiny"}, "task": {"prompts": "none"}, "training": settings})


def test_a_step_is_that_of_the_cpu(device: str, folder: Path, rows: list[TrainRow]) -> None:
    on_cpu = engine(folder, "cpu")
    on_device = engine(folder, device)
    expected = run_step(on_cpu, rows, 1, 0)
    found = run_step(on_device, rows, 1, 0)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-4)
    assert found.samples == expected.samples


@pytest.mark.trap("engines_disagree")
@pytest.mark.parametrize(("dtype", "exact_head", "most"), [("float32", False, 1e-3), ("bfloat16", True, 0.3)])
def test_an_engine_says_what_the_trainers_canary_says(
    device: str, folder: Path, dtype: str, exact_head: bool, most: float
) -> None:
    model = {"name": "tiny", "dtype": dtype, "float32_head": exact_head}
    sections = {"model": model, "generation": {"slots": 4, "device": device}}
    settings = Config.model_validate(config(device, precision=dtype).model_dump() | sections)
    canary = PolicyTrainer(settings, folder).canary()
    sampling = TorchEngine(folder, settings, version=0)
    assert canary_distance(canary, sampling.logprobs_after(np.array(canary.prompt))) < most


def test_autocast_and_gradient_checkpointing_train(device: str, folder: Path, rows: list[TrainRow]) -> None:
    exact = run_step(engine(folder, device), rows, 1, 0)
    rough = run_step(engine(folder, device, precision="bfloat16", gradient_checkpointing=True), rows, 1, 0)
    assert rough.metrics["grad_norm"] == pytest.approx(exact.metrics["grad_norm"], rel=0.1)


@pytest.mark.trap("not_finite")
def test_a_broken_step_changes_nothing(device: str, folder: Path, rows: list[TrainRow]) -> None:
    trainer = engine(folder, device)
    before = {name: tensor.clone() for name, tensor in trainer.named_tensors().items()}
    outcome = run_step(trainer, [replace(rows[0], advantage=float("nan")), *rows[1:]], 1, 0)
    assert (outcome.skipped, outcome.culprits) == ("not finite", (rows[0].key,))
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.named_tensors().items())


def test_a_checkpoint_resumes(device: str, folder: Path, rows: list[TrainRow], tmp_path: Path) -> None:
    trainer = engine(folder, device)
    run_step(trainer, rows, 1, 0)
    trainer.save(tmp_path, {"version": 1})
    resumed, extra = PolicyTrainer.resume(config(device), tmp_path)
    assert extra == {"version": 1}
    for name, tensor in trainer.named_tensors().items():
        assert torch.equal(tensor, resumed.named_tensors()[name])
    first, second = (run_step(one, rows, 1, 1) for one in (trainer, resumed))
    assert first.metrics == pytest.approx(second.metrics, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_the_ratio_of_what_the_engine_has_sampled_is_one(device: str, folder: Path, dtype: str, most: float) -> None:
    model = {"name": "tiny", "dtype": dtype, "float32_head": dtype == "bfloat16"}
    sections = {"model": model, "generation": {"slots": 8, "max_new_tokens": 24, "device": device}}
    settings = Config.model_validate(config(device, precision=dtype).model_dump() | sections)
    sampling = TorchEngine(folder, settings, version=0)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, VOCABULARY, int(draw.integers(2, 20))).astype(np.int32) for _ in range(16)]
    sampling.submit(*(SampleRequest((number, 0, 0), each, number, 1.0, 24) for number, each in enumerate(prompts)))
    done = [completion for _ in range(200) if sampling.active for completion in sampling.step()]
    assert len(done) == len(prompts)
    metrics = run_step(PolicyTrainer(settings, folder), [train_row(each) for each in done], 0, 0).metrics
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-4 if dtype == "float32" else 1e-2)
    assert metrics["mismatch/kl"] < most
