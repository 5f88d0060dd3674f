"""The wandb sink, offline."""

from pathlib import Path

import pytest

wandb = pytest.importorskip("wandb", reason="the extra `wandb` is not installed")


def test_an_offline_run_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.telemetry.sinks import open_sinks

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    said: list[str] = []
    (sink,) = open_sinks(["wandb"], tmp_path, "run", {"seed": 1}, said.append)
    sink.write(1, {"reward/mean": 0.25})
    sink.close(deadline=60)
    wandb.teardown()  # its own process serves all runs of this one
    assert said == []
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
