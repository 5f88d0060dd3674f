"""What the engine recorded is what the trainer computes, whatever the model's own files say about sampling."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from asyncrl.config.schema import Config
from asyncrl.engines.canary_logprobs import canary_distance
from asyncrl.engines.generation.engine_interface import Completion
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step
from tests.unit.engines.generation.conftest import KNOWN, Lab, drain, requests, same

FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "smollm2"]
ENDS = (2, 3)
NOTHING_ELSE: Mapping[str, Any] = {}
SHAPE = {"slots": 8, "max_new_tokens": 24}


def engine(folder: Path, dtype: str = "float32", float32_head: bool = False, **generation: Any) -> TorchEngine:
    sections = {
        "model": {"name": "tiny", "dtype": dtype, "float32_head": float32_head},
        "task": {"prompts": "none", "max_prompt_tokens": 40},
        "generation": SHAPE | generation,
    }
    return TorchEngine(folder, Config.model_validate(sections), 0)


def train_row(done: Completion) -> TrainRow:
    group, member, attempt = done.request.key
    tokens = done.tokens.astype(np.int64)
    prompt = done.request.prompt.astype(np.int64)
    versions = done.versions.astype(np.int64)
    temperature = done.request.temperature
    return TrainRow(group, member, attempt, 0, prompt, tokens, done.logprobs, versions, 1.0, temperature=temperature)


def trained_on(folder: Path, done: dict[Any, Completion], model: Mapping[str, Any] = NOTHING_ELSE) -> dict[str, float]:
    """Metrics of a step on these samples by the weights that sampled them; in bfloat16 if that is the model's dtype."""
    training = {"precision": model.get("dtype", "float32")}
    given = {"model": {"name": "m", **model}, "training": training, "task": {"prompts": "p"}, "steps": 2}
    config = Config.model_validate(given)
    return run_step(PolicyTrainer(config, folder), [train_row(done[key]) for key in sorted(done)], 0, 0).metrics


def agrees(metrics: dict[str, float]) -> None:
    """The ratio is 1, from the log-prob in the sampling forward to the loss."""
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["policy/logprob_difference_max"] < 5e-5
    assert metrics["mismatch/kl"] < 1e-8


@pytest.mark.trap("tempered_logprobs")
@pytest.mark.trap("raw_logprobs")
@pytest.mark.parametrize(
    ("family", "temperatures"),
    [*((each, (0.6, 1.0, 1.3)) for each in FAMILIES), ("llama", (0.6,)), ("llama", (1.0,)), ("llama", (1.3,))],
    ids=str,
)
def test_the_ratio_of_what_the_engine_has_just_sampled_is_one(
    family: str, temperatures: tuple[float, ...], lab: Lab
) -> None:
    """Also with temperatures side by side."""
    each = [requests(9, temperature=t)[number::3] for number, t in enumerate(temperatures * 3) if number < 3]
    done = drain(engine(lab.folder(family)), [request for part in each for request in part])
    agrees(trained_on(lab.folder(family), done))


@pytest.mark.trap("engines_disagree")
def test_with_a_float32_head_engine_and_trainer_in_bfloat16_agree_better(lab: Lab) -> None:
    folder = lab.folder("llama-tied")
    kl = {}
    for exact in (False, True):
        done = drain(engine(folder, dtype="bfloat16", float32_head=exact), requests(24))
        metrics = trained_on(folder, done, {"dtype": "bfloat16", "float32_head": exact})
        kl[exact] = metrics["mismatch/kl"]
    assert 0 < kl[True] < 0.8 * kl[False]


@pytest.mark.trap("engines_disagree")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_canary_sings_where_the_engine_has_the_trainers_weights_and_only_there(family: str, lab: Lab) -> None:
    """While all slots are in use, too; what runs draws what it would have drawn."""
    folder = lab.folder(family)
    asked = requests(12)
    config = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, "steps": 2})
    canary = PolicyTrainer(config, folder).canary()
    assert list(canary.logprobs) == sorted(canary.logprobs, reverse=True)
    prompt = np.array(canary.prompt)
    sampling = engine(folder)
    heard = list[float]()
    done = drain(sampling, asked, lambda _: heard.append(canary_distance(canary, sampling.logprobs_after(prompt))))
    expected = drain(engine(folder), asked)
    assert max(heard) < 1e-4
    assert all(np.array_equal(done[key].tokens, expected[key].tokens) for key in expected)
    changed = lab.weights(family, seed=None)
    changed["model.layers.0.mlp.down_proj.weight"] = -changed["model.layers.0.mlp.down_proj.weight"]
    sampling.load(changed, 1, share=False)
    assert canary_distance(canary, sampling.logprobs_after(prompt)) > 0.1


@pytest.fixture(params=["llama", "llama-tied"])
def loud_padding(request: pytest.FixtureRequest, lab: Lab, tmp_path: Path) -> Path:
    """A model whose rows of the head beyond the tokenizer have by far the largest logits, one way or the other."""
    folder = shutil.copytree(lab.folder(request.param), tmp_path / "loud")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight[KNOWN:] *= 100
        logits = model(torch.arange(40)[None]).logits[0]
    assert float((logits.argmax(-1) >= KNOWN).float().mean()) > 0.9, "sampled from the whole head, they would be drawn"
    model.save_pretrained(folder)
    return folder


@pytest.mark.trap("padded_vocabulary")
@pytest.mark.parametrize("gap", [0, 10])
def test_ids_beyond_the_tokenizer_are_neither_sampled_nor_in_the_trainers_softmax(gap: int, loud_padding: Path) -> None:
    """With a gap the tokenizer gets one more token, that many ids above the others: those below it are sampled too."""
    if gap:
        file = loud_padding / "tokenizer.json"
        described = json.loads(file.read_text())
        described["model"]["vocab"]["<top>"] = KNOWN + gap
        file.write_text(json.dumps(described))
    done = drain(engine(loud_padding), requests(12))
    highest = max(int(completion.tokens.max()) for completion in done.values())
    assert highest < KNOWN if not gap else KNOWN + 1 < highest <= KNOWN + gap
    agrees(trained_on(loud_padding, done))


OPINIONATED = {
    "do_sample": True,
    "temperature": 0.01,
    "top_k": 1,
    "top_p": 0.1,
    "min_p": 0.5,
    "repetition_penalty": 5.0,
    "no_repeat_ngram_size": 1,
    "max_length": 3,
    "max_new_tokens": 2,
    "min_new_tokens": 20,
    "suppress_tokens": list(range(5, 100)),
}


@pytest.mark.trap("sampling_of_the_model")
def test_the_models_generation_config_changes_nothing_but_the_ends(lab: Lab, tmp_path: Path) -> None:
    plain = lab.folder("llama")
    told = shutil.copytree(plain, tmp_path / "told")
    ends = GenerationConfig.from_pretrained(plain).eos_token_id
    (told / "generation_config.json").write_text(json.dumps({**OPINIONATED, "eos_token_id": ends}))
    expected, found = (
        drain(engine(each, deterministic=True), requests(10, max_new_tokens=24)) for each in (plain, told)
    )
    assert all(same(found[key], completion) for key, completion in expected.items())
    assert max(len(completion.tokens) for completion in found.values()) > 3


@pytest.mark.trap("sampling_of_the_model")
def test_a_checkpoint_keeps_the_generation_config_as_it_came(lab: Lab, tmp_path: Path) -> None:
    """Also one that contradicts itself, as some models' do, and that transformers would not write."""
    folder = shutil.copytree(lab.folder("llama"), tmp_path / "told")
    told = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [3, 4]}
    (folder / "generation_config.json").write_text(json.dumps(told))
    config = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, "steps": 2})
    PolicyTrainer(config, folder).save(tmp_path / "saved", {})
    kept = json.loads((tmp_path / "saved" / "model" / "generation_config.json").read_text())
    assert {name: kept[name] for name in told} == told


@pytest.mark.trap("invented_end")
def test_an_answer_that_was_cut_off_has_no_end_and_every_answer_says_how_it_ended(lab: Lab) -> None:
    done = list(drain(engine(lab.folder("llama"), stop=("a",)), requests(60)).values())
    assert {completion.finish for completion in done} == {"stop", "stop_string", "length"}
    for completion in done:
        ends = np.isin(completion.tokens, ENDS)
        assert ends.sum() == ends[-1] == (completion.finish == "stop")
        assert completion.finish != "length" or len(completion.tokens) == completion.request.max_new_tokens
        assert len(train_row(completion).response_ids) == len(completion.logprobs) == len(completion.tokens)


@pytest.mark.trap("dropout")
def test_the_engine_samples_without_dropout(lab: Lab, tmp_path: Path) -> None:
    folder = shutil.copytree(lab.folder("llama"), tmp_path / "dropping")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "attention_dropout": 0.5}))
    engines = [engine(each) for each in (folder, lab.folder("llama"))]
    assert not any(module.training for each in engines for module in each._flat.model.modules())
    dropping, plain = (drain(each, requests(6)) for each in engines)
    assert all(same(dropping[key], completion) for key, completion in plain.items())
