"""A person rates while a run trains: no rating is lost, whoever is killed, and each is the reward of its sample."""

import gzip
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from raters import Rater, likes_vowels
from torchless_runs import Run
from watching import PATIENCE

pytestmark = [pytest.mark.fleet, pytest.mark.kills, pytest.mark.usefixtures("programs")]

STEPS = 12
FLAGS = ["--steps", str(STEPS), "--training.checkpoint_every", "3", "--evaluate.prompts=", "--reward.functions", "[]"]
FLAGS += [
    "--feedback.ask",
    "rate",
    "--task.prompts_per_step",
    "4",
    "--task.samples_per_prompt",
    "4",
    "--telemetry.samples_per_step",
    "all",
]


def spans(run_dir: Path, name: str) -> list[tuple[float, float]]:
    """Returns start and end of each call of this name in the trace."""
    with gzip.open(run_dir / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    return [(each["ts"], each["ts"] + each["dur"]) for each in events if (each["ph"], each["name"]) == ("X", name)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_rating_is_lost_when_workers_and_the_command_are_killed(quickstart_model: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ["--model.name", str(quickstart_model), *FLAGS], "quickstart", standins=False)
    with Rater(run.directory, likes_vowels) as rater:
        with run.running() as process:
            for service in ("reward", "generation", "training"):
                run.until_step(process, run.version + 1)
                os.kill(run.pid_of(service), signal.SIGKILL)
            run.until_step(process, run.version + 2)
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE)
        address = (run.directory / "feedback.json").read_text()
        with run.running() as process:
            run.until_step(process, run.version + 2)
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE)
        assert run.to_its_end() == 0, run.shown
    assert (run.directory / "feedback.json").read_text() == address
    run.audited()
    ratings = [line for line in lines(run.directory / "ratings.jsonl") if line["kind"] == "rating"]
    on_disk = {answer["sample"]: answer["value"] for line in ratings for answer in line["answers"]}
    assert rater.kept.items() <= on_disk.items()
    assert max(Counter(answer["sample"] for line in ratings for answer in line["answers"]).values()) == 1
    samples = lines(run.directory / "samples.jsonl")
    assert len(samples) >= STEPS * 4  # The texts of a step are gone with the worker that held them.
    assert [each["reward"] for each in samples] == [(likes_vowels(each["text"]) - 1) / 4 for each in samples]
    generated, scored = (spans(run.directory, name) for name in ("generate", "score"))
    assert any(start < end < stop for _, end in scored for start, stop in generated), "nothing was rewarded meanwhile"
    assert lines(run.directory / "metrics.jsonl")[-1]["feedback/ratings"] <= len(ratings)
