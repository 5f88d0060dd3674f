"""The real controller on the virtual clock takes what a published simulation of asynchronous training takes.

Eight devices, 1024 samples a step of lognormal lengths (sigma 1, mean 4096, at most 28672), 10 ms a token and 60 us
more for each running sample, 4500 tokens a second and device trained, 10 s for new weights. Tokens count by sixteen.
"""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.bench.overlap.side_run import run_on_virtual_clock
from asyncrl.bench.overlap.timed_services import LengthSpread, StageTimes, timed_services
from asyncrl.config.sources import load
from asyncrl.telemetry.jsonl import read_metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
UNIT = 16
BATCH = 1024
SAMPLED = 4007
"""Tokens that count as one, samples of a step, and their mean tokens after the cut."""
FOREVER = 1e9
DEADLINES = ("staleness.publish_deadline", "generation.deadline", "fleet.call_deadline", "fleet.watchdog")
CELLS = {
    "colocated": (443, 8, 8, 0, {}),
    "disaggregated": (443 / 0.78, 5, 3, 0, {}),
    "limit 1": (443 / 2.23, 5, 3, 1, {}),
    "limit 4, drained": (443 / 1.38, 3, 5, 4, {"update": "drain"}),
}
"""Published seconds of a step, devices that train and generate, limit, and further settings."""


@pytest.mark.parametrize("name", CELLS)
def test_a_step_takes_what_was_published(name: str, tmp_path: Path) -> None:
    published, training, generators, limit, changes = CELLS[name]
    assert seconds_of_a_batch(tmp_path / "run", training, generators, limit, changes) == pytest.approx(
        published, rel=0.05
    )


def seconds_of_a_batch(path: Path, training: int, generators: int, limit: int, changes: dict[str, Any]) -> float:
    """Returns the seconds in which as many tokens are trained as a batch has in the mean."""
    keys = {key: value for key, value in changes.items() if "." in key}
    times = StageTimes(
        LengthSpread(4096 / UNIT, 1.0, 28672 // UNIT),
        token=0.01 * UNIT,
        each=60e-6 * UNIT,
        slots=256,
        load=10.0,
        trained_token=UNIT / (4500 * training),
        **{key: value for key, value in changes.items() if key not in keys},
    )
    values = {
        "model.name": "none",
        "task.prompts": "none",
        "steps": 8,
        "task.prompts_per_step": BATCH,
        "task.samples_per_prompt": 1,
        "algorithm.advantage": "batch",
        "generation.slots": times.slots,
        "generation.replicas": generators,
        "generation.max_new_tokens": times.lengths.cap,
        "staleness.limit": limit,
        "telemetry.trace": False,
        **dict.fromkeys(DEADLINES, FOREVER),
        **keys,
    }
    directory = run_on_virtual_clock(load(None, (), values=values).config, timed_services(times, generators), path)
    steps = read_metrics(directory.metrics)
    counted = steps[3:]
    tokens = UNIT * sum(step["tokens/trained"] for step in counted)
    return (steps[-1]["time"] - steps[2]["time"]) / tokens * BATCH * SAMPLED
