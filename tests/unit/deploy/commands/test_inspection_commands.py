"""The commands that look at something and print it: samples, keys, experiments, graph."""

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from asyncrl.config.sections.algorithm_config import PRESETS
from asyncrl.deploy import cli
from asyncrl.telemetry.jsonl import LineFile
from asyncrl.telemetry.samples_file import TRANSITIONS, SampleRecord
from tests import golden

TOML = """\
[model]
name = "m"
[task]
prompts = "p.jsonl"
"""
RECORD = SampleRecord(
    step=1, incarnation=0, group=0, member=0, attempt=0, prompt="question", text="answer", finish="stop", tokens=5,
    reward=0.0, terms={"numeric": 0.0}, advantage=0.0, first=1, last=1, trained=5, masked=0,
)  # fmt: skip
ACTED = replace(
    RECORD, prompt="Walk", text="16 transitions with a reward of 3", finish=TRANSITIONS, tokens=16, trained=16,
    reward=3.0, advantage=3.0, terms={}, first=0, last=0,
)  # fmt: skip


def record(step: int, group: int, reward: float, masked: int = 0, member: int = 0) -> SampleRecord:
    texts = {"prompt": f"question {group}", "text": f"answer {group}", "reason": "stale" if masked else ""}
    numbers = {"step": step, "group": group, "member": member, "reward": reward, "terms": {"numeric": reward}}
    return replace(RECORD, **texts, **numbers, first=step, last=step, trained=5 - masked, masked=masked)


def write_samples(folder: Path, *records: SampleRecord) -> None:
    (folder / "samples.jsonl").unlink(missing_ok=True)
    file = LineFile(folder / "samples.jsonl")
    for each in records:
        file.append(asdict(each))
    file.close()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two steps with a group of several answers and one that was masked, and a file of its rows."""
    groups = (record(1, 10, 0.5), record(1, 11, 1.0), record(2, 20, 0.0, masked=2), record(2, 21, 0.25))
    write_samples(tmp_path, *groups, record(2, 21, 1.0, member=1))
    rows = [{"frage": f"question {number}", "loesung": f"wanted {number}"} for number in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f'prompts = "{tmp_path}/rows.jsonl"\ncolumns = {{ prompt = "frage" }}\nshuffle = false\n'
    (tmp_path / "config.toml").write_text(f'[model]\nname = "m"\n[task]\n{task}prompts_per_step = 2\n')
    (tmp_path / "journal").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        ("", [20, 21]),
        ("--step 1", [10, 11]),
        ("--best -n 1", [11]),
        ("--worst -n 2", [20, 21]),
        ("--masked", [20]),
        ("--group 10", [10]),
        ("--compare --best -n 1", [11]),
        ("--compare --step 2 --worst", [20, 21]),
    ],
)
def test_samples(flags: str, groups: list[int], run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["samples", str(run_dir), *flags.split()]) == 0
    golden.says(shown := capsys.readouterr().out)
    assert [group for group in (10, 11, 20, 21) if f"answer {group}" in shown] == groups


def test_samples_without_their_rows_and_none_at_all(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "rows.jsonl").unlink()
    assert cli.main(["samples", str(run_dir), "-n", "1"]) == 0
    golden.says(capsys.readouterr().out, "the columns of the rows are not shown")
    assert cli.main(["samples", str(run_dir), "--step", "9"]) == 2
    golden.says(capsys.readouterr().err, "of steps 1 to 2")


def test_samples_of_a_policy_that_acts_are_transitions_and_episodes(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Episodes are those of the newest evaluation, with its picture."""
    write_samples(run_dir, ACTED)
    assert cli.main(["samples", str(run_dir)]) == 0
    golden.says(capsys.readouterr().out, "no episode was evaluated")
    folder = run_dir / "evaluations"
    folder.mkdir()
    for version, returns in ((9, [1.0]), (10, [475.25, None, 12.0])):
        episodes = [
            {"version": version, "episode": number, "reward": each, "steps": 7, "finish": "truncated"}
            for number, each in enumerate(returns)
        ]
        (folder / f"{version}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in episodes))
    (folder / "10.gif").write_bytes(b"GIF89a")
    assert cli.main(["samples", str(run_dir), "-n", "2"]) == 0
    golden.says(capsys.readouterr().out, "475.25", "10.gif")
    assert cli.main(["samples", str(run_dir), "--parquet", str(run_dir / "x.parquet")]) == 2
    golden.says(capsys.readouterr().err)
    assert not (run_dir / "x.parquet").exists()


def test_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys"]) == 0
    everything = capsys.readouterr().out
    assert "model.name  (text; required)" in everything
    assert "staleness.cut_at  (int > 0 | never | none; default none)" in everything
    assert cli.main(["keys", "num_generations"]) == 0
    assert capsys.readouterr().out.startswith("task.samples_per_prompt")


def test_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["experiments"]) == 0
    assert "quickstart" in capsys.readouterr().out


SAFE = "--algorithm.preset safe_rlhf --cost.functions length --cost.limit 1"
GROUPED = """--reward.functions '[{use = "mine.py:best", group = true}]'"""
BY_TOKEN = """--algorithm.preset ppo --reward.functions '[{use = "mine.py:best", by_token = true}]'"""


@pytest.mark.parametrize(
    ("flags", "fact"),
    [
        ("--generation.replicas 2 --evaluate.prompts h --evaluate.replicas 2 --reward.replicas 3", "THREE_D_PROTO"),
        ("--algorithm.kl 0.1 --fleet.wire tcp", "CURVE"),
        ("--training.layout '{dp = 2, shard = 2}'", "dp 2 x shard 2"),
        (f"--reward.replicas 3 {GROUPED}", "GroupReward: 3 x "),
        (f"--reward.replicas 3 {BY_TOKEN}", "ONE_OF_BY_GROUP"),
        ("--model.lora.rank 4", "rank 4"),
        (
            '--model.lora.targets \'["q_proj", "v_proj"]\' --algorithm.kl 0.01',
            "reference  the trainer computes its log-probs",
        ),
        ("--generation.colocate training --staleness.limit 0", "nothing is published"),
        (
            "--generation.colocate training --staleness.limit 0 --evaluate.prompts h",
            "evaluation two slots: the trainer writes",
        ),
        ("--algorithm.preset ppo", "critic  (Critic: 1 x"),
        (f"{SAFE} --reward.model m", "asyncrl.services.reward_model:RewardModelService)"),
        (
            "--algorithm.preset dapo --algorithm.clip_high 0.4 --algorithm.entropy_bonus 0.1",
            "clip_high = 0.4  * not 0.28",
        ),
    ],
)
def test_graph(
    flags: str, fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Services, their contracts and sockets, and the way of new weights."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(TOML)
    assert cli.main(["graph", "mine.toml", *shlex.split(flags)]) == 0
    golden.says(capsys.readouterr().out, fact)


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ("", {"clip_low": "0.2", "clip_high": "0.2", "old_logprobs": '"engine"', "normalize_std": "true", "kl": None}),
        ("kl=0.1", {"kl": "0.1  *", "kl_in": '"loss"', "kl_estimator": '"k2"'}),
        ("preset=m2po", {"clip_low": None, "clip_high": None}),
        ("preset=gspo", {"weight_cap": "2.0"}),
        ("preset=sapo kl=0.1 kl_in=reward kl_estimator=k1", {"clip_low": None}),
        ("old_logprobs=recomputed clip_high=0.3", {"correction": '"cap"', "weight_cap": "2.0", "clip_high": "0.3  *"}),
        (
            "old_logprobs=recomputed correction=mask",
            {"old_logprobs": '"recomputed"  *', "correction": '"mask"  *'},
        ),
        ("old_logprobs=recomputed correction=none", {"correction": '"none"  *'}),
    ],
)
def test_graph_shows_every_part_that_is_read(
    flags: str, shown: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["graph", "quickstart", *(f"--algorithm.{flag}" for flag in flags.split())]) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    parts = dict(line.strip().split(" = ", 1) for line in lines if " = " in line)
    assert {name: parts.get(name) for name in shown} == shown


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_is_a_flag_of_the_quickstart(preset: str) -> None:
    costs = SAFE.split()[2:] if preset == "safe_rlhf" else []
    assert cli.main(["graph", "quickstart", "--algorithm.preset", preset, *costs]) == 0
