"""The TensorBoard sink writes files that TensorBoard reads."""

from pathlib import Path

import pytest

pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")


def test_scalars_come_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from asyncrl.telemetry.sinks import open_sinks

    said: list[str] = []
    (sink,) = open_sinks(["tensorboard"], tmp_path, "run", {}, said.append)
    sink.write(1, {"reward/mean": 0.25})
    sink.write(2, {"reward/mean": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert said == []
