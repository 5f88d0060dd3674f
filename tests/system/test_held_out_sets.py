"""A run with two held-out sets keeps its best checkpoint and all answers, and ends when its callback says so."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.sources import load
from asyncrl.deploy.process.fork_client import Forks
from asyncrl.deploy.run_fleet import RunRequest
from asyncrl.deploy.run_setup import run
from asyncrl.deploy.standalone_evaluation import Wanted, evaluate_run
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer
from asyncrl.telemetry.display import open_display
from asyncrl.telemetry.jsonl import read_lines, read_metrics
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.samples_file import read_samples

pytestmark = pytest.mark.fleet
STEPS = 60
LAST = 7


def shorter_than(limit: int) -> dict[str, Any]:
    return {"use": "length", "name": f"under_{limit}", "options": {"maximum": limit, "slack": limit - 1}}


def values_of(place: Path) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    tokenizer = build_tokenizer(())
    build_model(tokenizer).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    rows = [{"prompt": f"say {number}:", "answer": str(number)} for number in range(12)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = str(place / "rows.jsonl")
    short = {"prompts": source, "size": 3, "samples": 2, "temperature": 1.0, "every": 3, "functions": [shorter_than(3)]}
    return {
        "model.name": str(place / "model"),
        "task": {"prompts": source, "prompts_per_step": 2, "samples_per_prompt": 12},
        "steps": STEPS,
        "generation.max_new_tokens": 8,
        "staleness": {"cut_at": "never", "limit": 20},  # No member of a group is dropped for its age.
        "reward.functions": [shorter_than(8)],
        "training": {
            "learning_rate": 1e-3,
            "checkpoint_every": 0,
            "keep_checkpoints": 1,
            "keep_best": "eval/short/reward/mean",
        },
        "evaluate": {"prompts": source, "size": 4, "every": 2, "pass_reward": 0.0, "sets": {"short": short}},
    }


async def trained(place: Path, forks: Forks) -> tuple[RunDirectory, list[dict[str, float]]]:
    seen: list[dict[str, float]] = []

    def on_step(metrics: dict[str, float]) -> bool:
        seen.append(metrics)
        return metrics["step"] >= LAST

    config = load(None, (), {}, values_of(place)).config
    request = RunRequest(config, place / "run", open_display(STEPS), "again", forks=forks, on_step=on_step)
    return await run(request), seen


async def test_sets_answers_best_checkpoint_and_callback_of_one_run(
    forks: Forks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, seen = await trained(tmp_path, forks)
    last = read_metrics(directory.metrics)[-1]["step"]
    assert [metrics["step"] for metrics in seen] == list(range(1, last + 1))
    assert LAST <= last < STEPS
    evaluations = list(read_lines(directory.evaluations))
    versions = {name: [line["version"] for line in evaluations if line["name"] == name] for name in ("", "short")}
    assert all(found[0] == 0 and found[-1] == last for found in versions.values())
    assert set(versions["short"]) <= {*range(0, STEPS, 3), *versions[""], last}
    assert {name for line in evaluations for name in line["terms"]} == {"under_8", "under_3"}
    assert all(set(line["pass_at"]) == ({"1", "2"} if line["name"] else set()) for line in evaluations)
    answers = list(read_lines(directory.answers / "short" / f"{last}.jsonl"))
    assert [(each["question"], each["member"]) for each in answers] == [(q, m) for q in range(3) for m in range(2)]
    assert all(each["prompt"].endswith(f"say {each['question']}:") and each["row"] for each in answers)
    best = json.loads(directory.best.read_text())
    means = {line["version"]: line["mean"] for line in evaluations if line["name"] == "short"}
    kept = {int(path.name) for path in directory.checkpoints.iterdir() if path.name.isdecimal()}
    assert best["value"] == means[best["version"]] == max(means[version] for version in kept)
    assert {best["version"], last} <= kept
    assert len(kept) <= 3
    check_samples(directory)
    check_lanes(directory)
    (alone,) = await evaluate_run(directory.path, wanted=Wanted(sets=("short",), step="best"))
    assert (alone.version, alone.prompts, alone.name) == (best["version"], 3, "short")
    assert alone.mean == pytest.approx(best["value"], abs=1e-3)
    assert f"the run ends after step {LAST}, as on_step" in capsys.readouterr().out


def check_samples(directory: RunDirectory) -> None:
    """Each step has one whole group, although telemetry.samples_per_step is smaller, with a number for each token."""
    records = read_samples(directory.samples)
    by_step = {step: [each for each in records if each.step == step] for step in {each.step for each in records}}
    assert {len(own) for own in by_step.values()} == {12}
    assert all(len({each.group for each in own}) == 1 for own in by_step.values())
    assert all(
        len(each.token_ids) == len(each.token_logprobs) == len(each.token_versions) == each.tokens for each in records
    )


def check_lanes(directory: RunDirectory) -> None:
    with gzip.open(directory.path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"decode", "forward", "backward", "optimizer"} <= lanes
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"samples"}
