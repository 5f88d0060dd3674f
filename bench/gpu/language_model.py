"""A language model of 0.4 billion weights on the device: measurements 13, sampling, and 14, a step of the trainer.

Both take bfloat16 weights of random values. Tokens are counted as the user gets them, time as it passes on the wall.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.bench.end_to_end.benchmark_model import VOCABULARY, EndlessEngine, make_tokenizer
from asyncrl.bench.generation_speed.benchmark import complete, generate_in_batches
from asyncrl.bench.gpu.bench_device import BenchDevice, Results
from asyncrl.config.schema import Config
from asyncrl.engines.generation.engine_interface import SampleRequest
from asyncrl.engines.models.model_loading import load_pretrained
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step

WIDTH = 1024
LAYERS = 24
LAYER_BYTES = 2 * (3 * WIDTH**2 + 12 * WIDTH**2)
"""Bytes of a layer in bfloat16."""

SLOTS = 128
PROMPT = 64
FEWEST = 32
MOST = 256
"""Tokens of an answer: as uneven as answers of a reasoning task."""

STEPS = 3
DTYPE = "bfloat16"


def sampling(bench: BenchDevice) -> Results:
    """Measures useful tokens a second of the torch engine, which refills its slots, beside transformers.generate, whose
    batches run to their longest answer. Each side samples half of the requests before it is timed."""
    slots = _slots(bench)
    with _model_folder(bench) as folder:
        work = _requests(2 * slots)
        tokens = sum(request.max_new_tokens for request in work)
        engine = EndlessEngine(folder, _config(bench, slots), version=0)
        complete(engine, work[:slots])
        ours = tokens / bench.timer.seconds(lambda: complete(engine, work))
        plain = load_pretrained(folder, dtype=torch.bfloat16).to(bench.device).eval()
        plain.generation_config.eos_token_id = None
        generate_in_batches(plain, work[:slots], slots)
        theirs = tokens / bench.timer.seconds(lambda: generate_in_batches(plain, work, slots))
    found = {"engine_tokens_s": ours, "transformers_tokens_s": theirs, "engine_over_transformers": ours / theirs}
    return found | {"slots": slots}


def training_step(bench: BenchDevice) -> Results:
    """Measures tokens a second of a trainer's step on the answers of a batch, and floating-point operations a second by
    six for each weight and token (Kaplan et al. 2020, section 2.1), which leaves attention out."""
    with _model_folder(bench) as folder:
        trainer = PolicyTrainer(_config(bench, _slots(bench)), folder)
        rows = [_row(number, request) for number, request in enumerate(_requests(_slots(bench)))]
        tokens = sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
        run_step(trainer, rows, 1, 0)

        def steps() -> None:
            for _ in range(STEPS):
                assert run_step(trainer, rows, 1, 0).updates

        rate = STEPS * tokens / bench.timer.seconds(steps)
    weights = sum(tensor.numel() for tensor in trainer.named_tensors().values())
    return {"tokens_s": rate, "TFLOP_s": 6 * weights * rate / 1e12, "weights": weights}


def _slots(bench: BenchDevice) -> int:
    return SLOTS if bench.largest >= LAYER_BYTES else 4


def random_llama(largest: int, positions: int) -> LlamaForCausalLM:
    """Returns a Llama in bfloat16 whose layers fit into so many bytes, at most LAYERS; a tiny one where not one does.
    positions: tokens of its longest row."""
    layers = min(largest // LAYER_BYTES, LAYERS)
    width = WIDTH
    if layers == 0:
        layers = 2
        width = 64
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=positions,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(shape).to(torch.bfloat16)


@contextmanager
def _model_folder(bench: BenchDevice) -> Iterator[Path]:
    with TemporaryDirectory(prefix="asyncrl-bench-") as name:
        random_llama(bench.largest, PROMPT + MOST).save_pretrained(name)
        make_tokenizer().save_pretrained(name)
        yield Path(name)


def _config(bench: BenchDevice, slots: int) -> Config:
    sections: dict[str, Any] = {
        "model": {"name": "random", "dtype": DTYPE},
        "task": {"prompts": "none", "max_prompt_tokens": PROMPT},
        "generation": {"slots": slots, "max_new_tokens": MOST, "device": bench.device},
        "training": {"device": bench.device, "precision": DTYPE, "micro_batch_tokens": 16_384, "learning_rate": 1e-6},
    }
    return Config.model_validate(sections)


def _requests(count: int) -> Sequence[SampleRequest]:
    source = np.random.default_rng(0)
    lengths = source.integers(8, PROMPT + 1, count)
    answers = source.integers(FEWEST, MOST + 1, count)
    return [
        SampleRequest((number, 0, 0), source.integers(4, VOCABULARY, prompt).astype(np.int32), number, 1.0, int(answer))
        for number, (prompt, answer) in enumerate(zip(lengths, answers, strict=True))
    ]


def _row(number: int, request: SampleRequest) -> TrainRow:
    source = np.random.default_rng(number)
    length = request.max_new_tokens
    return TrainRow(
        group=number // 8,
        member=number % 8,
        attempt=0,
        incarnation=1,
        prompt_ids=request.prompt.astype(np.int64),
        response_ids=source.integers(4, VOCABULARY, length),
        logprobs=np.full(length, -np.log(VOCABULARY), np.float32),
        versions=np.zeros(length, np.int64),
        advantage=float(source.normal()),
    )
