"""`asyncrl-bench whatif` and `advise`: what they print, and a run directory that calibrates them."""

from pathlib import Path

import pytest

from asyncrl.bench.overlap.prediction import advise, what_if
from asyncrl.errors import ConfigError

JOB = """
[models]
actor = "qwen2.5-7b"
[work]
prompt_tokens = 256
response_tokens = 1000
spread = SPREAD
samples = 64
[[devices]]
gpu = "H100"
hosts = 2
"""


def job(folder: Path, spread: float, more: str = "") -> str:
    (folder / "job.toml").write_text(JOB.replace("SPREAD", str(spread)) + more)
    return str(folder / "job.toml")


def test_the_step_is_predicted_with_its_bottleneck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what_if.main([job(tmp_path, 0.8, "[split]\ngeneration = 8\ntraining = 8\n")])
    printed = capsys.readouterr().out
    assert "at limit 1, 8 GPUs generate and 8 train" in printed
    assert "predicted: a synchronous step of " in printed
    assert "generation holds up the trainer: give it more GPUs" in printed


def test_advice_is_to_overlap_with_a_long_tail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    advise.main([job(tmp_path, 1.0)])
    assert "go asynchronous: " in capsys.readouterr().out


def test_advice_is_to_stay_synchronous_without_a_tail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal lengths and halves: neither side has a bubble to fill, so that a split can only lose."""
    advise.main([job(tmp_path, 0.0, "[split]\ngeneration = 4\ntraining = 12\n")])
    assert "stay synchronous: " in capsys.readouterr().out


def test_a_run_calibrates_only_with_its_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the job file has no \[split\]"):
        what_if.main([job(tmp_path, 0.0), "--run", str(tmp_path)])
