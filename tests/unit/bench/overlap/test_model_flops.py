"""Loop MFU of a recorded run, from a model whose FLOPs are counted by hand."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.bench import cli
from asyncrl.bench.overlap.accounting import mfu_of, peak_flops
from asyncrl.deploy.report.run_record import read_run
from asyncrl.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy" / "report"))
from recorded_runs import SAMPLE, recorded_run, step

SHAPE = {"vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
PARAMETERS = 2 * 10 * 4 + 2 * (4 * 4 * 4 + 3 * 4 * 8 + 2 * 4) + 4
"""Embeddings of both ends; in each layer four products of attention, three of the rest and two norms; the last norm."""


def run_of(path: Path) -> Path:
    numbers = {"tokens/trained": 100.0, "staleness/wasted_tokens": 20.0, "completions/length_mean": 6.0}
    samples = [replace(SAMPLE, prompt_ids=[1, 2, 3, 4], token_ids=[5], token_logprobs=[-1.0], token_versions=[0])]
    run = recorded_run(path, [step(n, 2.0 * n, **numbers) for n in range(1, 12)], samples)
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text(json.dumps(SHAPE))
    return run


def test_sampled_tokens_count_once_and_trained_ones_three_times(tmp_path: Path) -> None:
    # A token attends to 4 tokens of its prompt and 3 of its completion: 4 FLOPs for each, 2 layers and 4 numbers.
    forward = 2 * PARAMETERS + 4 * 2 * 4 * (4 + 3)
    needed = (120 + 3 * 100) * forward
    run = read_run(run_of(tmp_path / "run"))
    assert mfu_of(run, peak=1e6) == pytest.approx(needed / (2.0 * 1e6 * run.devices))


def test_a_model_without_a_known_shape_is_named(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", [step(1, 1.0)])
    with pytest.raises(ConfigError, match="its model m has a shape that is not known"):
        mfu_of(read_run(run), 1e12)


def test_a_peak_is_a_known_gpu_or_a_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert 9e14 < peak_flops("H100") < 1e15
    assert peak_flops("1e12") == 1e12
    for text in ("A1", "-1", "0", "nan", "inf"):
        with pytest.raises(ConfigError, match="is no number above 0, and none of A100, H100"):
            peak_flops(text)
    monkeypatch.setattr(sys, "argv", ["asyncrl-bench", "overlap", "quickstart", "--peak", "H100"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "--peak is for run directories" in capsys.readouterr().err
