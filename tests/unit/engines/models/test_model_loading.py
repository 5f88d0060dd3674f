"""A model that is loaded needs its file no more."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import Config
from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.generation.attention import PLAIN, AttentionRule
from asyncrl.engines.generation.engine_interface import SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.models.model_loading import load_pretrained
from asyncrl.engines.training.critic_trainer import CriticTrainer
from asyncrl.engines.training.models_with_heads import frozen_logprobs, load_causal_model
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import SampleRow
from asyncrl.errors import ConfigError
from tests.unit.engines.generation.conftest import drain


def test_weights_lie_in_memory_of_their_own(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama")
    (file,) = folder.glob("*.safetensors")
    model = load_pretrained(folder)
    assert str(file) not in Path("/proc/self/maps").read_text()
    assert model.get_input_embeddings().weight.requires_grad


def test_a_file_that_was_cut_short_is_named(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(model_folder("llama"), cut)
    os.truncate(cut / "model.safetensors", 1000)
    with pytest.raises(ConfigError, match=rf"^model\.name: {cut}/model\.safetensors is cut short.* Get it again"):
        load_pretrained(cut)


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "cuda:x", "meta", "mps", "CPU", "cpu:x", ""])
def test_a_device_that_torch_has_not_is_refused_by_its_key(device: str) -> None:
    with pytest.raises(ConfigError, match=rf'^training\.device = "{device}" cannot be used: \S.*"cpu"'):
        refuse_unusable("training.device", device)
    refuse_unusable("training.device", "cpu")


# Rotary embeddings past the length that a model was made for: static ones are right, the others are refused.
ORIGINAL = 16
LONGEST = 64
THETA = {"rope_theta": 10000.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
STATIC = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
}
TRAINERS = (PolicyTrainer, CriticTrainer)
DYNAMIC = {"max_position_embeddings": ORIGINAL, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **THETA}}
MakeFolder = Callable[..., Path]


def config_of(longest: int = LONGEST) -> Config:
    task = {"prompts": "none", "max_prompt_tokens": longest - 8}
    generation = {"slots": 8, "max_new_tokens": 8}
    return Config.model_validate({"model": {"name": "tiny"}, "task": task, "generation": generation})


def asked(*lengths: int) -> list[SampleRequest]:
    draw = np.random.default_rng(3)
    prompts = [draw.integers(5, 261, length) for length in lengths]
    return [SampleRequest((n, 0, 0), prompt, 7 + n, 1.0, 8) for n, prompt in enumerate(prompts)]


@pytest.mark.parametrize("kind", STATIC)
def test_static_scaling_is_that_of_the_trainer_whatever_lies_beside(kind: str, changed_model: MakeFolder) -> None:
    """Rows on both sides of the original length run side by side; the trainer computes each of them alone."""
    folder = changed_model("llama", max_position_embeddings=LONGEST, rope_parameters={**STATIC[kind], **THETA})
    engine = TorchEngine(folder, config_of(), 0)
    assert engine._flat.fast
    done = drain(engine, asked(3, 9, 14, 30, 56))
    model = load_causal_model(folder, "cpu")
    plain = AutoModelForCausalLM.from_pretrained(folder, rope_parameters={"rope_type": "default", **THETA})
    for each in done.values():
        prompt = each.request.prompt.astype(np.int64)
        tokens = each.tokens.astype(np.int64)
        (alone,) = frozen_logprobs(model, [SampleRow(prompt, tokens)], 1024)
        np.testing.assert_allclose(each.logprobs, alone, atol=5e-5)
        ids = torch.from_numpy(np.concatenate([prompt, tokens]))[None]
        assert not torch.allclose(plain(ids).logits, model.whole(ids).logits, atol=1e-2), "the scaling changes nothing"


def test_frequencies_that_follow_the_longest_row_are_refused_wherever_a_model_computes(
    changed_model: MakeFolder,
) -> None:
    folder = changed_model("llama", **DYNAMIC)
    config = config_of(ORIGINAL + 1)
    for make in (lambda: TorchEngine(folder, config), *(partial(kind, config, folder) for kind in TRAINERS)):
        with pytest.raises(ConfigError, match=r"model\.name: .*'dynamic'.* once it passes 16 tokens.* at most 16"):
            make()


def test_frequencies_that_follow_the_longest_row_are_served_within_the_original_length(
    changed_model: MakeFolder,
) -> None:
    folder = changed_model("llama", **DYNAMIC)
    done = drain(TorchEngine(folder, config_of(ORIGINAL), 0), asked(3, 8))
    model = load_causal_model(folder, "cpu")
    for each in done.values():
        prompt = each.request.prompt.astype(np.int64)
        tokens = each.tokens.astype(np.int64)
        (alone,) = frozen_logprobs(model, [SampleRow(prompt, tokens)], 1024)
        np.testing.assert_allclose(each.logprobs, alone, atol=5e-5)


def test_the_probe_at_the_start_finds_a_window_that_no_rule_knows(
    changed_model: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads no rule of any layer. A probe of a dozen tokens lies within the window, where windowed and plain attention
    are the same."""
    monkeypatch.setattr(AttentionRule, "of", lambda settings, limit: PLAIN)
    folder = changed_model("mistral", sliding_window=24)
    with pytest.raises(ConfigError, match="'mistral' is not supported: its logits differ by"):
        TorchEngine(folder, config_of(), 0)
    TorchEngine(folder, config_of(24), 0)


def test_the_canary_of_each_version_is_as_long_as_the_probe(changed_model: MakeFolder) -> None:
    folder = changed_model("mistral", sliding_window=24)
    assert len(PolicyTrainer(config_of(), folder).canary().prompt) == 24 + 12
    assert len(PolicyTrainer(config_of(20), folder).canary().prompt) == 12
