"""`asyncrl-bench whatif` and `advise`: what they print, and a run directory that calibrates them."""

import json
import tomllib
from pathlib import Path

import pytest

from asyncrl.bench.planning import planned_jobs, validate
from asyncrl.bench.planning.planned_jobs import map_models
from asyncrl.errors import ConfigError
from asyncrl.simulation.planning import step_prediction

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
    planned_jobs.what_if([job(tmp_path, 0.8, "[split]\ngeneration = 8\ntraining = 8\n")])
    printed = capsys.readouterr().out
    assert "at limit 1, 8 GPUs generate and 8 train" in printed
    assert "predicted: a synchronous step of " in printed
    assert "generation holds up the trainer: give it more GPUs" in printed


def test_advice_is_to_overlap_with_a_long_tail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned_jobs.advise([job(tmp_path, 1.0)])
    assert "go asynchronous: " in capsys.readouterr().out


def test_advice_is_to_stay_synchronous_without_a_tail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal lengths and halves: neither side has a bubble to fill, so that a split can only lose."""
    planned_jobs.advise([job(tmp_path, 0.0, "[split]\ngeneration = 4\ntraining = 12\n")])
    assert "stay synchronous: " in capsys.readouterr().out


def test_a_run_calibrates_only_with_its_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the job file has no \[split\]"):
        planned_jobs.what_if([job(tmp_path, 0.0), "--run", str(tmp_path)])


# Predictions beside published rows: those that come out, and those that are listed as missing.
KNOWN = validate.read_rows()
ROWS = {row["id"]: row for row in KNOWN["rows"]}
QUICK = [name for name, row in ROWS.items() if row["kind"] not in ("step", "speedup")]
"""Rows that need no run on virtual time; `asyncrl-bench validate` compares all."""
LOSING = "Qwen3-30B-A3B, 16 GB200, speed-up"


@pytest.mark.parametrize("name", QUICK)
def test_a_row_comes_out_or_is_listed_as_missing(name: str) -> None:
    found = validate.compared(ROWS[name])
    assert found.agrees == (name not in KNOWN["misses"]), found


def test_every_miss_is_a_row_with_a_reason_and_every_row_a_source() -> None:
    assert set(KNOWN["misses"]) <= set(ROWS)
    assert all(KNOWN["misses"].values())
    assert all(row["source"] for row in KNOWN["rows"])
    assert len(ROWS) == len(KNOWN["rows"])


def test_findings_of_hybridflow_come_out() -> None:
    """All models share few GPUs and split many; transitions cost a ninth; a quarter of the GPUs each is 3 times as
    slow."""
    for name in (
        "placement of 34b on 32 GPUs",
        "placement of 34b on 64 GPUs",
        "placement of 34b on 128 GPUs",
        "transition of 70B beside a copy",
        "average beside OpenRLHF",
        "least and most beside OpenRLHF",
    ):
        assert name not in KNOWN["misses"]
        assert validate.compared(ROWS[name]).agrees


def test_advice_on_the_published_losing_case_is_to_stay_synchronous(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NeMo RL's Qwen3-30B-A3B on 16 GB200: 221 s on policy, 301 s one step off policy. Layouts are left free."""
    monkeypatch.setattr(step_prediction, "MOST_SAMPLES", 128)
    tables = ROWS[LOSING]["job"]
    lines = ["[models]", *(f'{role} = "{model}"' for role, model in tables["models"].items())]
    lines += ["[work]", *(f"{key} = {json.dumps(value)}" for key, value in tables["work"].items())]
    lines += ["[split]", "generation = 8", "training = 8", "[[devices]]", 'gpu = "GB200"', "hosts = 4"]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    planned_jobs.advise([str(tmp_path / "job.toml")])
    assert "stay synchronous: " in capsys.readouterr().out


def test_rows_that_miss_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    validate.main(["--only", "generation of"])
    printed = capsys.readouterr().out
    assert "0 of 2 rows come out; those that miss:" in printed
    assert printed.count("MISSES") == 2
    assert "by a roofline both read as many keys and values" in printed


# `asyncrl-bench map` prints the mapping with its reason and writes pools.


TWO_MODELS = """
[models]
actor = "qwen2.5-1.5b"
critic = "qwen2.5-1.5b"
[work]
samples = 256
[[devices]]
gpu = "A100"
hosts = ["one", "two"]
"""


def test_the_mapping_is_printed_with_its_reason_and_pools_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(TWO_MODELS)
    map_models([str(tmp_path / "job.toml"), "--write", str(tmp_path / "pools.toml")])
    printed = capsys.readouterr().out
    assert "predicted seconds, iteration: " in printed
    assert "why: one set on all GPUs is the fastest" in printed
    assert "2 placements fit" in printed
    written = tomllib.loads((tmp_path / "pools.toml").read_text())
    assert written["pools"]["actor_critic"]["hosts"] == ["one", "two"]
    assert written["critic"]["pool"] == written["training"]["pool"] == "actor_critic"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = 3", "models: Input should be a valid"),
        (TWO_MODELS.replace("qwen2.5-1.5b", "llama-8"), "the model 'llama-8' is no folder"),
        (TWO_MODELS.replace('"A100"', '"B9"'), "there is no GPU 'B9'"),
        (TWO_MODELS.replace('"two"', '"one"'), "a host is named twice"),
        (TWO_MODELS.replace("critic", "judge"), "judge is no role; roles are actor, generation"),
        (TWO_MODELS + "gpus = 6", "no power of two"),
    ],
)
def test_a_wrong_job_is_refused_with_the_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        map_models([str(tmp_path / "job.toml")])
