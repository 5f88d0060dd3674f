"""A run in exact arithmetic is the same however many replicas sample, and with however many slots."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.sources import load
from asyncrl.deploy.run_setup import RunRequest, run
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer
from asyncrl.telemetry.display import open_display
from asyncrl.telemetry.metrics_file import read_metrics
from asyncrl.telemetry.samples_file import read_samples

STEPS = 3

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(())
    build_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def history(model: Path, place: Path, replicas: int, slots: int) -> tuple[list[Any], list[float]]:
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
    directory = await run(RunRequest(load(None, (), {}, values).config, place / "run", open_display(STEPS), "again"))
    samples = [(s.step, s.group, s.member, s.text, s.tokens, s.trained) for s in read_samples(directory.samples)]
    return sorted(samples), [line["grad_norm"] for line in read_metrics(directory.metrics)]


@pytest.mark.trap("seeds")
async def test_three_replicas_equal_one_replica_bit_for_bit(model: Path, tmp_path: Path) -> None:
    found = []
    for replicas, slots in ((1, 32), (3, 4)):
        place = tmp_path / str(replicas)
        place.mkdir()
        found.append(await history(model, place, replicas, slots))
    (samples, norms), (others, other_norms) = found
    assert len(samples) == STEPS * 16
    assert samples == others
    assert norms == other_norms
    assert len({norm for norm in norms if norm > 0}) == STEPS
