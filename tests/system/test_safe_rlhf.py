"""Safe RLHF in whole fleets: costs stay under their limit where plain PPO's do not, and all of it survives a resume."""

import io
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from asyncrl.config.schema import Config
from asyncrl.controller.journal.audit import audit
from asyncrl.controller.journal.checkpoints import MANIFEST
from asyncrl.deploy.run_fleet import RunRequest
from asyncrl.deploy.run_setup import run
from asyncrl.deploy.standalone_evaluation import evaluate_run
from asyncrl.errors import ConfigError
from asyncrl.telemetry.display import LineDisplay
from asyncrl.telemetry.jsonl import read_metrics
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.samples_file import read_samples

pytestmark = pytest.mark.fleet

STEPS = 50
LAST = 8
LIMIT = 0.2
"""LAST: steps whose means count as those of the end."""

JUDGES = """
def share(sample, letter):
    letters = sample.text.split()
    return letters.count(letter) / max(1, len(letters))

def reward(sample):
    return share(sample, "a") + 0.7 * share(sample, "b")

def cost(sample):
    return share(sample, "a")

def prompts():
    return [{"prompt": letter} for letter in "abcdef"]
"""
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def save_tokenizer(folder: Path, letters: str = "abcdef") -> None:
    known = {"<eos>": 0, **{letter: number for number, letter in enumerate(letters, 1)}}
    words = Tokenizer(models.WordLevel(known, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt nothing: all letters are about as likely."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("policy")
    LlamaForCausalLM(LlamaConfig(vocab_size=7, **SIZES)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def judges(tmp_path: Path) -> Path:
    path = tmp_path / "judges.py"
    path.write_text(JUDGES)
    return path


def config(policy: Path, judges: Path, preset: str, **sections: Any) -> Config:
    given: dict[str, Any] = {
        "steps": STEPS,
        "model": {"name": str(policy)},
        "task": {"prompts": f"{judges}:prompts", "prompts_per_step": 4, "samples_per_prompt": 8},
        "generation": {"max_new_tokens": 6, "slots": 32},
        "reward": {"functions": [f"{judges}:reward"]},
        "training": {"learning_rate": 1e-2, "checkpoint_every": 0},
        "critic": {"learning_rate": 1e-2},
        "algorithm": {"preset": preset},
        "fleet": {"wire": "inproc"},
        "telemetry": {"samples_per_step": "all", "trace": False},
    }
    if preset == "safe_rlhf":
        cost = {"functions": [f"{judges}:cost"], "limit": LIMIT, "multiplier": 0.25, "multiplier_rate": 3.0}
        given |= {"cost": cost, "cost_critic": {"learning_rate": 1e-2}}
    for section, values in sections.items():
        given[section] = {**given.get(section, {}), **values} if isinstance(values, dict) else values
    return Config.model_validate(given)


async def trained(settings: Config, run_dir: Path) -> RunDirectory:
    directory = await run(RunRequest(settings, run_dir, LineDisplay(io.StringIO(), settings.steps), "the same"))
    assert audit(directory.path).ok, str(audit(directory.path))
    return directory


def costs(directory: RunDirectory, first: int) -> list[float]:
    """Of the answers that were written down from step `first` on, by their texts."""
    said = [record.text.split() for record in read_samples(directory.samples) if record.step >= first]
    return [letters.count("a") / max(1, len(letters)) for letters in said]


async def test_costs_stay_under_their_limit_while_the_reward_rises(policy: Path, judges: Path, tmp_path: Path) -> None:
    """`a` is worth more than `b`, and costs. Without the constraint all is `a`; with it most is `b`, although the
    multiplier begins too low for that."""
    free = await trained(config(policy, judges, "ppo"), tmp_path / "free")
    bound = await trained(config(policy, judges, "safe_rlhf"), tmp_path / "bound")
    assert fmean(costs(free, STEPS - LAST)) > LIMIT + 0.3
    assert fmean(costs(bound, STEPS - LAST)) < LIMIT
    for record in read_samples(bound.samples):
        letters = record.text.split()
        assert record.advantage is None, "a critic gives each token its own"
        assert record.terms["cost/cost"] == pytest.approx(letters.count("a") / max(1, len(letters)))
    lines = read_metrics(bound.metrics)
    assert all(line["cost/cost"] == pytest.approx(line["cost/mean"]) for line in lines)
    assert fmean(line["cost/mean"] for line in lines[-LAST:]) < LIMIT
    assert fmean(line["reward/mean"] for line in lines[:3]) < 0.45
    assert fmean(line["reward/mean"] for line in lines[-LAST:]) > 0.6
    multipliers = [line["cost/multiplier"] for line in lines]
    for before, after, line in zip(multipliers, multipliers[1:], lines, strict=False):
        assert (after > before) == (line["cost/mean"] > LIMIT) or before == after == max(multipliers)
    assert max(multipliers) > 2 * multipliers[0]
    assert all(line["critic/updates"] == line["cost_critic/updates"] == 1 for line in lines)


def save_judge(folder: Path, letters: str = "abcdef") -> Path:
    """A reward model that has learnt nothing."""
    torch.manual_seed(1)
    LlamaForSequenceClassification(LlamaConfig(vocab_size=7, num_labels=1, **SIZES)).save_pretrained(folder)
    save_tokenizer(folder, letters)
    return folder


async def test_reward_and_cost_models_score_and_a_resume_restores_multiplier_and_critics(
    policy: Path, judges: Path, tmp_path: Path
) -> None:
    """A reward model beside a function, a cost model alone, texts beside the samples, two critics."""
    judge = save_judge(tmp_path / "judge")
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a b c"}\n{"prompt": "d", "answer": "e f"}\n')
    sections: dict[str, Any] = {
        "reward": {"model": str(judge), "weight": 0.5},
        "cost": {"functions": [], "model": str(judge), "limit": 5.0},
        "algorithm": {"pretrain_coefficient": 0.1, "kl": 0.05},
        "task": {"pretrain": str(texts), "pretrain_per_step": 3},
        "evaluate": {"prompts": f"{judges}:prompts"},
    }
    first = await trained(config(policy, judges, "safe_rlhf", steps=2, **sections), tmp_path / "run")
    newest = first.path / "checkpoints" / "2"
    files = json.loads((newest / MANIFEST).read_text())["files"]
    assert {"trainer.pt", "critic/trainer.pt", "cost_critic/trainer.pt", "cost_critic/model/config.json"} <= set(files)
    left = torch.load(newest / "trainer.pt", weights_only=True)["multiplier"]
    again = await trained(config(policy, judges, "safe_rlhf", steps=3, **sections), tmp_path / "run")
    lines = read_metrics(again.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3]
    held_out = [json.loads(line) for line in again.evaluations.read_text().splitlines()]
    assert [each["version"] for each in held_out][-1] == 3
    assert all(each["prompts"] == 6 and each["unscorable"] == 0 for each in held_out)
    (alone,) = await evaluate_run(again.path)
    assert alone.mean == pytest.approx(held_out[-1]["mean"], rel=1e-3)
    assert alone.cost == pytest.approx(held_out[-1]["cost"], rel=1e-3)
    assert lines[2]["cost/multiplier"] == left < lines[1]["cost/multiplier"] < lines[0]["cost/multiplier"]
    for line in lines:
        assert line["reward/mean"] == pytest.approx(line["reward/reward"] + 0.5 * line["reward/model"])
        assert line["cost/mean"] == pytest.approx(line["cost/model"]) == pytest.approx(line["reward/model"])
        assert line["policy/pretrain_loss"] > 1.0
        assert line["time/cost/busy"] >= 0


async def test_scoring_model_with_another_tokenizer_is_refused_before_the_start(
    policy: Path, judges: Path, tmp_path: Path
) -> None:
    judge = save_judge(tmp_path / "judge", "fedcba")
    with pytest.raises(ConfigError, match=r"^reward\.model: its tokenizer is not that of model\.name"):
        await trained(config(policy, judges, "ppo", reward={"model": str(judge)}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


async def test_each_service_reaches_what_it_needs_of_the_others_over_tcp(
    policy: Path, judges: Path, tmp_path: Path
) -> None:
    """On TCP each worker has a key of its own, and each lane admits some roles."""
    sections: dict[str, Any] = {
        "fleet": {"wire": "tcp"},
        "generation": {"replicas": 2},
        "algorithm": {"kl": 0.05},
        "evaluate": {"prompts": f"{judges}:prompts"},
        "task": {"prompts_per_step": 2, "samples_per_prompt": 2},
    }
    done = await trained(config(policy, judges, "safe_rlhf", steps=2, **sections), tmp_path / "run")
    workers = {json.loads(line).get("service") for line in (done.path / "fleet.jsonl").read_text().splitlines()}
    assert {"generation", "reward", "cost", "reference", "training", "critic", "cost_critic"} <= workers
    assert [line["step"] for line in read_metrics(done.metrics)] == [1, 2]
    assert done.evaluations.read_text().splitlines()
