"""The predicted memory of trainer and critic is what torch allocates in a step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from asyncrl.config.schema import Config
from asyncrl.deploy.checks.memory_needs import TrainedModel, needs
from asyncrl.deploy.checks.run_prompts import RowLengths
from asyncrl.deploy.checks.worker_memory import (
    BUCKET_BYTES,
    ForwardPass,
    kept_bytes,
    largest_pass,
    likely_pass,
    pass_bytes,
    stage_bytes,
)
from asyncrl.engines.models.model_families import shared_from
from asyncrl.engines.models.model_shape import FLOAT, shape_of
from asyncrl.engines.training import optimizer
from asyncrl.engines.training.critic_trainer import CriticTrainer
from asyncrl.engines.training.packed_rows import pack_rows
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step
from tests.unit.deploy.checks.torch_memory import most_beside

WITHIN = 0.15
GROUPS = 4
MEMBERS = 4
PROMPT = 24
RESPONSE = 24
LENGTHS = RowLengths(PROMPT, PROMPT, 1)
WIDTHS = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_folder(**config) -> folder of a model with random weights, whose tokenizer knows all of its vocabulary."""

    def make(vocabulary: int = 600, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("model")
        options = {**WIDTHS, **HEADS, "max_position_embeddings": 128, "tie_word_embeddings": True, **changes}
        AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocabulary, **options)).save_pretrained(folder)
        words = {"<eos>": 0, **{f"w{number}": number for number in range(1, vocabulary)}}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
        return folder

    return make


def rows(*, shared: bool) -> list[TrainRow]:
    draw = np.random.default_rng(0)
    made = []
    for group in range(GROUPS):
        prompt = draw.integers(0, 50, PROMPT)
        for member in range(MEMBERS):
            values = {
                "prompt_ids": prompt if shared else draw.integers(0, 50, PROMPT),
                "response_ids": draw.integers(0, 50, RESPONSE),
                "logprobs": np.full(RESPONSE, -4, np.float32),
                "values": draw.normal(0, 0.3, RESPONSE).astype(np.float32),
                "versions": np.full(RESPONSE, 5),
            }
            made.append(TrainRow(group=group, member=member, attempt=0, incarnation=1, advantage=1.0, **values))
    return made


def config(training: dict[str, Any] | None = None, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"name": "m", **sections.pop("model", {})},
        "task": {"prompts": "p", "prompts_per_step": GROUPS, "samples_per_prompt": MEMBERS},
        "generation": {"max_new_tokens": RESPONSE},
        "training": {"micro_batch_tokens": 8 * (PROMPT + RESPONSE), **(training or {})},
    }
    return Config.model_validate(values | sections)


def bytes_of(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def check(chosen: Config, folder: Path, name: str, trainer: Any, *, shared: bool) -> None:
    """Compares all parts with a second step, which finds the moments of the first."""
    shape = shape_of(str(folder))
    assert shape is not None
    (need,) = [each for each in needs(chosen, shape, LENGTHS) if each.name == name]
    given = rows(shared=shared)
    run_step(trainer, given, 1, 5)
    most = most_beside(lambda: run_step(trainer, given, 1, 5))[0]
    learnt = bytes_of(trainer.optimizer.parameters)
    state = [each[key] for each in trainer.optimizer.parts[0].state.values() for key in ("exp_avg", "exp_avg_sq")]
    found = {"weights": bytes_of(trainer.model.whole.parameters()), "gradients": learnt, "optimizer": bytes_of(state)}
    for part, size in found.items():
        assert need.parts[part] == pytest.approx(size, rel=0.02), part
    size = likely_pass(chosen, shape, LENGTHS) if shared else largest_pass(chosen, LENGTHS)
    lora = chosen.model.lora is not None
    head = name == "training"
    activations = pass_bytes(chosen, shape, size, lora=lora, head=head)
    kept = kept_bytes(chosen, shape, size, activations, "cpu")
    assert kept > 0
    assert (need.expected if shared else need.bytes) == need.parts["process"] + need.least + activations + kept
    predicted = need.least + activations
    assert predicted == pytest.approx(most + found["weights"] + found["optimizer"], rel=WITHIN)
    assert activations == pytest.approx(most - learnt, rel=WITHIN)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "wide": ({"intermediate_size": 512, "num_hidden_layers": 2}, {}),
    "deep": ({"num_hidden_layers": 8}, {}),
    "many heads": ({"head_dim": 64, "num_key_value_heads": 4}, {}),
    "vocabulary": ({"vocabulary": 8000}, {}),
    "chunks": ({"vocabulary": 8000}, {"training": {"logits_chunk": 48}}),
    "checkpointing": ({"num_hidden_layers": 8}, {"training": {"gradient_checkpointing": True}}),
    "bfloat16": ({}, {"training": {"precision": "bfloat16"}}),
    "adapters": ({}, {"model": {"lora": {"rank": 8}}}),
}


LONG = ("wide", "deep", "many heads")
"""Cases whose numbers others have too, in other sums."""


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[pytest.mark.long] if each in LONG else []) for each in CASES]
)
def test_the_trainer_takes_what_is_predicted(case: str, make_folder: Callable[..., Path]) -> None:
    torch.manual_seed(0)
    changes, sections = CASES[case]
    folder = make_folder(**changes)
    chosen = config(**sections)
    check(chosen, folder, "training", PolicyTrainer(chosen, folder), shared=False)


def test_samples_that_share_their_prompt_take_what_is_predicted(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    chosen = config()
    check(chosen, folder, "training", PolicyTrainer(chosen, folder), shared=True)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_first_pass_of_an_update_finds_no_gradients_of_earlier_ones(
    groups: int, make_folder: Callable[..., Path]
) -> None:
    """Gradients at the end take the most of one group, and activations at the beginning the most of two. Of three, the
    last is the second pass, which finds all optimizer."""
    folder = make_folder(hidden_size=256, intermediate_size=512, vocabulary=200)
    chosen = config(task={"prompts": "p", "prompts_per_step": groups, "samples_per_prompt": MEMBERS})
    shape = shape_of(str(folder))
    assert shape is not None
    trained = TrainedModel("training", chosen, shape, LENGTHS, "cpu", chosen.training.layout)
    size = trained.likely_pass
    parts, with_others = (trained.parts(each, 0) for each in (size, replace(size, next_part=1.0)))
    trainer = PolicyTrainer(chosen, folder)
    given = rows(shared=True)[: groups * MEMBERS]
    run_step(trainer, given, 1, 5)
    most = most_beside(lambda: run_step(trainer, given, 1, 5))[0]
    assert parts["gradients"] + parts["activations"] == pytest.approx(most, rel=WITHIN)
    assert with_others["gradients"] + with_others["activations"] > (1 + WITHIN) * most


def test_layers_are_not_gathered_while_there_are_logits(make_folder: Callable[..., Path]) -> None:
    shape = shape_of(str(make_folder(vocabulary=8000)))
    size = largest_pass(config(), LENGTHS)
    assert shape is not None
    beside = {gathered: pass_bytes(config(), shape, size, gathered=gathered) for gathered in (0, 1000, 10**9, 10**12)}
    assert beside[0] - beside[1000] == 1000
    assert beside[0] > beside[10**9] == beside[10**12] > 0


@pytest.mark.parametrize(("device", "shares"), [("cpu", True), ("cuda", False)])
def test_short_prompts_are_shared_where_the_trainer_shares_them(
    device: str, shares: bool, make_folder: Callable[..., Path]
) -> None:
    """On a GPU samples have their own copy of a prompt that is shorter than their answers."""
    shape = shape_of(str(make_folder()))
    prompt = RESPONSE - 4
    assert shape is not None
    chosen = config({"micro_batch_tokens": 8 * (prompt + RESPONSE), "device": device})
    found = likely_pass(chosen, shape, RowLengths(prompt, prompt, 1), device=device)
    prompts = [np.full(prompt, member // MEMBERS) for member in range(8)]
    answers = [np.zeros(RESPONSE, np.int64)] * 8
    packed = pack_rows(prompts, answers, chosen.training.micro_batch_tokens, shared_from(device))
    assert (packed is not None) == shares
    tokens = 8 * (prompt + RESPONSE - 1) if packed is None else len(packed.ids)
    assert (found.tokens, found.queries > 0) == (tokens, shares)


def test_copies_sum_gradients_in_a_bucket_where_passes_take_less(make_folder: Callable[..., Path]) -> None:
    assert BUCKET_BYTES == FLOAT * optimizer.BUCKET
    folder = make_folder(vocabulary=200, hidden_size=512, intermediate_size=4096, num_hidden_layers=2)
    (shape, found), settings = (shape_of(str(folder)), {}), {"gradient_checkpointing": True, "micro_batch_tokens": 96}
    assert shape is not None
    for layout in ({"dp": 1}, {"dp": 2}, {"sp": 2}, {"shard": 2}):
        chosen = config({**settings, "layout": layout})
        trained = TrainedModel("training", chosen, shape, LENGTHS, "cpu", chosen.training.layout)
        found[str(layout)] = trained.parts(trained.likely_pass, 0)["activations"] == BUCKET_BYTES
    assert list(found.values()) == [False, True, True, False]


def test_a_critic_takes_what_is_predicted(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    chosen = config(algorithm={"preset": "ppo"})
    check(chosen, folder, "critic", CriticTrainer(chosen, folder), shared=False)


def test_small_tensors_leave_holes_in_the_heap_of_a_process_on_a_cpu(make_folder: Callable[..., Path]) -> None:
    shape = shape_of(str(make_folder()))
    size = largest_pass(config(), LENGTHS)
    assert shape is not None
    assert kept_bytes(config(), shape, size, 1000, "cpu") == 800
    assert kept_bytes(config(), shape, size, 1000, "cuda") == 0
    large = largest_pass(config({"micro_batch_tokens": 10**6}), RowLengths(10**5, 10**5, 1))
    assert kept_bytes(config(), shape, large, 1000, "cpu") == 0


@pytest.mark.parametrize("again", [False, True])
def test_each_pass_that_a_stage_of_slices_has_begun_takes_more(again: bool, make_folder: Callable[..., Path]) -> None:
    """Rounded weights are the same for all of them, and a rank has those of its slices."""
    shape = shape_of(str(make_folder()))
    size = ForwardPass(1, 1)
    assert shape is not None
    chosen = config({"precision": "bfloat16", "gradient_checkpointing": again})
    found = {
        tp: [stage_bytes(chosen, shape, size, 0, 4, passes, lora=False, tp=tp)[0] for passes in (1, 2, 3)]
        for tp in (1, 2)
    }
    for first, second, third in found.values():
        assert 0 < second - first == third - second
    sliced = 2 * shape.layers * (shape.layer_parameters() - shape.layer_parameters(2))
    assert sliced <= found[1][0] - found[2][0] < 1.2 * sliced
