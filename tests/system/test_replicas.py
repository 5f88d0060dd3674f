"""A run in exact arithmetic is the same however many replicas sample, and with however many slots."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.sources import load
from asyncrl.deploy.process.fork_client import Forks
from asyncrl.deploy.run_fleet import RunRequest
from asyncrl.deploy.run_setup import run
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer
from asyncrl.telemetry.display import open_display
from asyncrl.telemetry.jsonl import read_metrics
from asyncrl.telemetry.samples_file import read_samples

STEPS = 3

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(())
    build_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def history(model: Path, forks: Forks, place: Path, replicas: int, slots: int) -> tuple[list[Any], list[float]]:
    """What was sampled and trained, in order, and the norms of the gradients."""
    rows = [{"prompt": f"say {number}:", "answer": str(number)} for number in range(40)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model.name": str(model),
        "task.prompts": str(place / "rows.jsonl"),
        "task.prompts_per_step": 4,
        "task.samples_per_prompt": 4,
        "steps": STEPS,
        "generation.replicas": replicas,
        "generation.slots": slots,
        "generation.deterministic": True,
        "generation.max_new_tokens": 12,
        "reward.functions": [{"use": "length", "options": {"maximum": 12, "slack": 11}}],
        "staleness.limit": 0,
        "training.learning_rate": 1e-3,
        "telemetry.samples_per_step": "all",
        "telemetry.trace": False,
        "evaluate.prompts": "",
    }
    config = load(None, (), {}, values).config
    directory = await run(RunRequest(config, place / "run", open_display(STEPS), "again", forks=forks))
    samples = [(s.step, s.group, s.member, s.text, s.tokens, s.trained) for s in read_samples(directory.samples)]
    return sorted(samples), [line["grad_norm"] for line in read_metrics(directory.metrics)]


@pytest.mark.trap("seeds")
async def test_three_replicas_equal_one_replica_bit_for_bit(model: Path, forks: Forks, tmp_path: Path) -> None:
    found = []
    for replicas, slots in ((1, 32), (3, 4)):
        place = tmp_path / str(replicas)
        place.mkdir()
        found.append(await history(model, forks, place, replicas, slots))
    (samples, norms), (others, other_norms) = found
    assert len(samples) == STEPS * 16
    assert samples == others
    assert norms == other_norms
    assert len({norm for norm in norms if norm > 0}) == STEPS


GROUP_FUNCTION = """
def members(samples):
    return [float(len(samples)) + 0.001 * sample.member for sample in samples]
"""


async def test_the_samples_of_a_group_meet_however_many_replicas_score(model: Path, tmp_path: Path) -> None:
    """The reward is the number of samples that the function sees; whoever misses some would wait for them first."""
    (tmp_path / "together.py").write_text(GROUP_FUNCTION)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}:"}) + "\n" for n in range(40)))
    values = {
        "model.name": str(model),
        "task.prompts": str(tmp_path / "rows.jsonl"),
        "task.prompts_per_step": 4,
        "task.samples_per_prompt": 4,
        "steps": STEPS,
        "generation.max_new_tokens": 12,
        "reward.functions": [{"use": f"{tmp_path}/together.py:members", "group": True}],
        "reward.replicas": 3,
        "reference.replicas": 2,
        "algorithm.kl": 0.1,
        "evaluate.prompts": str(tmp_path / "rows.jsonl"),
        "evaluate.samples": 4,
        "evaluate.temperature": 1.0,
        "evaluate.size": 8,
        "evaluate.replicas": 2,
        "telemetry.samples_per_step": "all",
        "telemetry.trace": False,
    }
    config = load(None, (), {}, values).config
    directory = await run(RunRequest(config, tmp_path / "run", open_display(STEPS), "again"))
    rewards = [round(sample.reward) for sample in read_samples(directory.samples) if sample.reward is not None]
    assert set(rewards) == {4}
    lines = directory.evaluations.read_text().splitlines()
    assert {round(json.loads(line)["mean"]) for line in lines} == {4}
