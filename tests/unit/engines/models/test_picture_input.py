"""Generation, trainer and reference compute the log-probs of transformers' own forward over prompts with pictures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.engines.generation.engine_interface import Completion, SampleRequest
from asyncrl.engines.generation.tokenization import TokenizerWithStops
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.models.model_families import family_problems
from asyncrl.engines.models.model_loading import load_pretrained
from asyncrl.engines.training.models_with_heads import frozen_logprobs, load_causal_model
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step

TEMPERATURE = 0.8
Prompts = list[Any]


def config(**sections: dict[str, Any]) -> Config:
    generation = {"slots": 7, "max_new_tokens": 12, **sections.pop("generation", {})}
    task = {"prompts": "none", "max_prompt_tokens": 120, "max_picture_pixels": 4096}
    return Config.model_validate({"model": {"name": "tiny"}, "task": task, "generation": generation, **sections})


@pytest.fixture
def prompts(tokenizer: TokenizerWithStops, asked: Any, png: Any) -> Prompts:
    """Two prompts have the same tokens, and not the same pictures; one has two pictures and one has none."""
    shown = (("what?", png(32, 24, 1)), ("what?", png(32, 24, 2)), (png(16, 48, 3), "ab", png(24, 16, 4), "colour:"))
    return [*(tokenizer.prompt_and_pictures(asked(*parts)) for parts in shown), (tokenizer.prompt_ids("text"), None)]


def requests(prompts: Prompts, members: int = 4) -> list[SampleRequest]:
    return [
        SampleRequest((group, member, 0), ids, 100 * group + member, TEMPERATURE, 12, pictures=pictures)
        for group, (ids, pictures) in enumerate(prompts)
        for member in range(members)
    ]


def drained(engine: TorchEngine, asked: list[SampleRequest]) -> dict[Any, Completion]:
    engine.submit(*asked)
    found: list[Completion] = []
    while engine.running or engine.waiting:
        found += engine.step()
    return {each.request.key: each for each in sorted(found, key=lambda each: each.request.key)}


def plain_logprobs(folder: Path) -> Callable[[Completion], np.ndarray]:
    model = load_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def of(done: Completion) -> np.ndarray:
        prompt = done.request.prompt
        pictures = done.request.pictures
        ids = torch.from_numpy(np.concatenate([prompt, done.tokens]).astype(np.int64))[None]
        kinds = torch.zeros_like(ids, dtype=torch.int32)
        given: dict[str, Any] = {"input_ids": ids}
        if pictures is not None:
            kinds[0, pictures.places] = 1
            found = pictures.pictures
            grid = torch.from_numpy(pictures.pictures.grid)
            # A random model may sample the token of pictures, which is no picture there.
            embedded = model.get_input_embeddings()(ids)
            states = model.get_image_features(torch.from_numpy(found.pixels), grid, return_dict=True).pooler_output
            embedded[0, pictures.places] = torch.cat(states)
            positions, _ = model.model.get_rope_index(ids, kinds, grid)
            given = {"inputs_embeds": embedded, "position_ids": positions}
        logits = model(use_cache=False, **given).logits[0, len(prompt) - 1 : -1]
        every = (logits / TEMPERATURE).log_softmax(-1)
        return every.gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()

    return of


@pytest.mark.parametrize(
    "generation", [{}, {"prefill_tokens": 8}, {"deterministic": True}], ids=["plain", "chunks", "deterministic"]
)
def test_generation_trainer_and_reference_agree(folder: Path, prompts: Prompts, generation: dict[str, Any]) -> None:
    chosen = config(generation=generation)
    assert not list(family_problems(chosen, folder))
    done = drained(TorchEngine(folder, chosen, 0), requests(prompts))
    plain = plain_logprobs(folder)
    for each in done.values():
        assert np.abs(each.logprobs - plain(each)).max() < 1e-4
    rows = [row(each) for each in done.values()]
    reference = load_causal_model(folder, "cpu")
    for budget in (1e9, 120):
        for each, logprobs in zip(rows, frozen_logprobs(reference, rows, 1024, budget), strict=True):
            assert np.abs(logprobs - each.logprobs).max() < 1e-4
    outcome = run_step(PolicyTrainer(config(training={"updates": 2}), folder), rows, 0, 0)
    assert outcome.metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert outcome.metrics["mismatch/kl"] < 1e-7


def row(done: Completion) -> TrainRow:
    tokens = done.tokens.astype(np.int64)
    prompt = done.request.prompt.astype(np.int64)
    return TrainRow(
        *done.request.key,
        0,
        prompt,
        tokens,
        done.logprobs,
        done.versions.astype(np.int64),
        1.0 if done.request.key[1] % 2 else -1.0,
        temperature=TEMPERATURE,
        pictures=done.request.pictures,
    )


def test_pictures_matter_and_new_weights_see_them_anew(folder: Path, prompts: Prompts) -> None:
    """Samples of the same tokens and seeds differ by their picture; states of pictures of old weights are not kept."""
    engine = TorchEngine(folder, config(), 0)
    (ids, first), (_, second) = prompts[:2]
    assert np.array_equal(ids, prompts[1][0])
    one, two = (
        drained(engine, [SampleRequest((group, 0, 0), ids, 5, TEMPERATURE, 12, pictures=pictures)])[group, 0, 0]
        for group, pictures in enumerate((first, second))
    )
    assert not np.array_equal(one.logprobs[:1], two.logprobs[:1])
    weights = {each.name: engine._flat.model.get_parameter(each.name) for each in engine.spec.tensors}
    eyes = {name: tensor * 1.5 if "visual" in name else tensor.clone() for name, tensor in weights.items()}
    engine.load(eyes, 1, share=False)
    changed = drained(engine, [SampleRequest((2, 0, 0), ids, 5, TEMPERATURE, 12, pictures=first)])[2, 0, 0]
    assert not np.array_equal(one.logprobs[:1], changed.logprobs[:1])


def test_the_encoder_of_pictures_is_trained(folder: Path, prompts: Prompts) -> None:
    done = drained(TorchEngine(folder, config(), 0), requests(prompts[:2]))
    trainer = PolicyTrainer(config(), folder)
    before = {name: tensor.clone() for name, tensor in trainer.named_tensors().items() if "visual" in name}
    run_step(trainer, [row(each) for each in done.values()], 0, 0)
    after = trainer.named_tensors()
    assert len(before) > 5
    assert [name for name, tensor in before.items() if torch.equal(tensor, after[name])] == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"generation": {"engine": "vllm"}}, "samples without pictures"),
        ({"training": {"layout": {"tp": 2}}}, "its layers are neither split nor put on stages"),
        ({"model": {"name": "tiny", "lora": {}}}, "adapters for its layers are not made"),
        ({"algorithm": {"preset": "ppo"}}, "a critic reads text only"),
    ],
)
def test_what_has_no_way_for_pictures_is_refused(folder: Path, sections: dict[str, Any], said: str) -> None:
    (problem,) = family_problems(config(**sections), folder)
    assert said in problem.text
    assert not problem.is_warning
