"""The fleet that `asyncrl-bench overhead` measures: stages that sleep, in real processes."""

from pathlib import Path

import pytest

from asyncrl.bench.overhead.runtime_cost import GROUPS, MEMBERS, STAGES, WARM, emulated_run
from asyncrl.telemetry.jsonl import read_metrics

pytestmark = pytest.mark.fleet


def test_emulated_stages_run_and_sleep_as_long_as_configured(tmp_path: Path) -> None:
    asked = dict(zip(STAGES, (0.02, 0.01, 0.01, 0.02), strict=True))
    found = emulated_run((0.02, 0.01, 0.01, 0.02), WARM + 20, tmp_path)
    assert set(found.slept) == set(STAGES)
    for stage, seconds in found.slept.items():
        assert seconds >= 0.9 * asked[stage], found
    assert found.seconds >= 0.9 * max(asked.values())
    lines = read_metrics(next(tmp_path.rglob("metrics.jsonl")))[WARM:]
    stale = sum(line.get("data/dropped/stale", 0) for line in lines)
    assert stale < 0.25 * GROUPS * MEMBERS * len(lines), "groups are stamped with the version before their turn"
