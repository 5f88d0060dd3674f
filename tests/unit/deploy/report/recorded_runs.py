"""Run directories as a run leaves them, without the run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.config.toml_writer import dump
from asyncrl.telemetry.jsonl import LineFile
from asyncrl.telemetry.samples_file import SampleRecord

SAMPLE = SampleRecord(
    step=1,
    incarnation=0,
    group=0,
    member=0,
    attempt=0,
    prompt="reverse ab:",
    text="ba",
    finish="stop",
    tokens=3,
    reward=1.0,
    terms={"exact_match": 1.0},
    advantage=0.5,
    first=0,
    last=0,
    trained=3,
    masked=0,
)


def step(number: int, time: float, incarnation: int = 0, **metrics: float) -> dict[str, Any]:
    return {"step": number, "time": time, "incarnation": incarnation, "reward/mean": 0.5, **metrics}


def recorded_run(
    path: Path,
    steps: Sequence[Mapping[str, Any]],
    samples: Sequence[SampleRecord] = (),
    evaluations: Sequence[Mapping[str, Any]] = (),
    **sections: Any,
) -> Path:
    """Writes a run without a journal."""
    (path / "logs").mkdir(parents=True)
    values = {"model": {"name": "m"}, "task": {"prompts": "p"}, "reward": {"functions": ["exact_match"]}}
    (path / "config.toml").write_text(dump(Config.model_validate(values | sections)))
    files = {
        "metrics.jsonl": steps,
        "samples.jsonl": [sample.fields() for sample in samples],
        "evaluations.jsonl": evaluations,
    }
    for name, lines in files.items():
        file = LineFile(path / name)
        for line in lines:
            file.append(line)
        file.close()
    return path
