"""`asyncrl-bench map` prints the mapping with its reason and writes pools."""

import tomllib
from pathlib import Path

import pytest

from asyncrl.bench.planning.planned_jobs import map_models
from asyncrl.errors import ConfigError

JOB = """
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
    (tmp_path / "job.toml").write_text(JOB)
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
        (JOB.replace("qwen2.5-1.5b", "llama-8"), "the model 'llama-8' is no folder"),
        (JOB.replace('"A100"', '"B9"'), "there is no GPU 'B9'"),
        (JOB.replace('"two"', '"one"'), "a host is named twice"),
        (JOB.replace("critic", "judge"), "judge is no role; roles are actor, generation"),
        (JOB + "gpus = 6", "no power of two"),
    ],
)
def test_a_wrong_job_is_refused_with_the_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        map_models([str(tmp_path / "job.toml")])
