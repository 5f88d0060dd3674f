"""The commands that look at something: samples, keys, experiments, graph, audit, export, evaluate."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from asyncrl.config.sections.algorithm_config import PRESETS
from asyncrl.deploy import cli
from asyncrl.telemetry.jsonl import LineFile
from asyncrl.telemetry.samples_file import SampleRecord

TOML = """\
[model]
name = "m"
[task]
prompts = "p.jsonl"
"""


def record(step: int, group: int, reward: float, masked: int = 0) -> SampleRecord:
    return SampleRecord(
        step=step, incarnation=0, group=group, member=0, attempt=0, prompt=f"question {group}", text=f"answer {group}",
        finish="stop", tokens=5, reward=reward, terms={"numeric": reward}, advantage=0.0, first=step, last=step,
        trained=5 - masked, masked=masked, reason="stale" if masked else "",
    )  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    file = LineFile(tmp_path / "samples.jsonl")
    for each in (record(1, 10, 0.5), record(1, 11, 1.0), record(2, 20, 0.0, masked=2), record(2, 21, 0.25)):
        file.append(asdict(each))
    file.close()
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        ([], [20, 21]),
        (["--step", "1"], [10, 11]),
        (["--best", "-n", "1"], [11]),
        (["--worst", "-n", "2"], [20, 21]),
        (["--masked"], [20]),
        (["--group", "10"], [10]),
    ],
)
def test_samples(flags: list[str], groups: list[int], run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["samples", str(run_dir), *flags]) == 0
    text = capsys.readouterr().out
    assert [group for group in (10, 11, 20, 21) if f"answer {group}" in text] == groups
    assert ("(stale)" in text) == (20 in groups)


@pytest.mark.parametrize("flags", [["--best"], ["--compare"]])
def test_columns_of_the_rows_and_the_numbers_of_samples_are_shown(
    flags: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"frage": f"question {number}", "loesung": f"wanted {number}"} for number in range(30)]
    (run_dir / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f'prompts = "{run_dir}/rows.jsonl"\ncolumns = {{ prompt = "frage" }}\nshuffle = false\n'
    (run_dir / "config.toml").write_text(f'[model]\nname = "m"\n[task]\n{task}prompts_per_step = 2\n')
    (run_dir / "journal").mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert cli.main(["samples", str(run_dir), *flags, "-n", "1"]) == 0
    text = capsys.readouterr().out
    assert "row: frage = question" in text
    assert f"loesung = wanted {11 if flags == ['--best'] else 20}" in text
    assert "1 of 4 recorded samples, of 32 in the batches of 2 steps" in text
    (run_dir / "rows.jsonl").unlink()
    assert cli.main(["samples", str(run_dir), *flags, "-n", "1"]) == 0
    assert "the columns of the rows are not shown: task.prompts: there is no file" in capsys.readouterr().out


def test_whole_groups_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = LineFile(tmp_path / "samples.jsonl")
    for member, reward in enumerate((0.0, 1.0, 0.5)):
        file.append(asdict(replace(record(1, 10, reward), member=member)))
    file.close()
    assert cli.main(["samples", str(tmp_path), "--compare", "--best", "-n", "1"]) == 0
    text = capsys.readouterr().out
    assert text.count("question 10") == 1
    assert [text.index(f"member {member}") for member in (1, 2, 0)] == sorted(
        text.index(f"member {each}") for each in range(3)
    )


def test_samples_that_are_not_there(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["samples", str(run_dir), "--step", "9"]) == 2
    assert "of steps 1 to 2" in capsys.readouterr().err
    assert cli.main(["samples", str(tmp_path / "nowhere")]) == 2
    assert "name a run directory" in capsys.readouterr().err


def test_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys"]) == 0
    everything = capsys.readouterr().out
    assert "model.name  (text; required)" in everything
    assert "staleness.cut_at  (int > 0 | never | none; default none)" in everything
    assert cli.main(["keys", "num_generations"]) == 0
    assert capsys.readouterr().out.startswith("task.samples_per_prompt")
    assert cli.main(["keys", "epsilom"]) == 2
    assert "did you mean epsilon?" in capsys.readouterr().err


def test_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["experiments"]) == 0
    assert "quickstart" in capsys.readouterr().out
    assert cli.main(["experiments", "x"]) == 2


def test_graph_shows_what_the_contracts_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    assert cli.main(["graph", str(path), "--generation.replicas", "2", "--evaluate.prompts", "h"]) == 0
    text = capsys.readouterr().out
    assert "mine: grpo on 4 services, 5 workers, one process each" in text
    assert "generation1.0-<incarnation>-<id>.{control,work,data}" in text
    generate = next(line.split() for line in text.splitlines() if line.strip().startswith("generate "))
    assert generate[:3] == ["generate", "ONE_OF_HOLDER", "work"]
    assert "ReferenceService" not in text
    lanes = [line for line in text.splitlines() if "idempotent: " in line]
    assert any("balanced THREE_D_PROTO  " in line for line in lanes)
    assert all(len(re.split(r"\s{2,}", line.strip())) >= 4 for line in lanes), "columns have space between them"
    assert cli.main(["graph", str(path), "--algorithm.kl", "0.1", "--fleet.wire", "tcp"]) == 0
    text = capsys.readouterr().out
    assert "logprobs" in text
    assert "CURVE" in text
    assert "training  (Training: 1 x [pp 1 x tp 1 x dp 1], " in text
    assert cli.main(["graph", str(path), "--training.layout", "{dp = 2, shard = 2}"]) == 0
    assert "training  (Training: 1 x [pp 1 x tp 1 x dp 2 x shard 2], " in capsys.readouterr().out
    assert cli.main(["graph"]) == 2


def test_graph_shows_replicas_of_every_service_and_where_the_samples_of_a_group_meet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TOML)

    def shown(*flags: str) -> str:
        replicas = ["--reward.replicas", "3", "--evaluate.prompts", "h", "--evaluate.replicas", "2"]
        assert cli.main(["graph", str(path), *replicas, *flags]) == 0
        return capsys.readouterr().out

    alone = shown()
    assert "reward  (Reward: 3 x " in alone
    assert "evaluation  (Generation: 2 x " in alone
    assert re.search(r"score +ONE_OF +work", alone)
    in_groups = shown("--reward.functions", '[{use = "mine.py:best", group = true}]')
    assert "reward  (GroupReward: 3 x " in in_groups
    assert re.search(r"score +ONE_OF_BY_GROUP +work", in_groups)
    by_token = shown("--algorithm.preset", "ppo", "--reward.functions", '[{use = "mine.py:best", by_token = true}]')
    assert "reward  (TokenReward: 3 x " in by_token
    assert re.search(r"score +ONE_OF_BY_GROUP +work", by_token)


def test_graph_shows_every_part_that_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TOML)

    def parts(*flags: str) -> dict[str, str]:
        assert cli.main(["graph", str(path), *flags]) == 0
        lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
        return dict(line.strip().split(" = ", 1) for line in lines if " = " in line)

    plain = parts()
    assert (plain["clip_low"], plain["clip_high"], plain["old_logprobs"]) == ("0.2", "0.2", '"engine"')
    assert plain["normalize_std"] == "true"
    assert not {"kl", "kl_in", "correction_level", "dynamic_sampling", "entropy_bonus"} & plain.keys()
    assert parts("--algorithm.kl", "0.1").keys() - plain.keys() == {"kl", "kl_in", "kl_estimator"}
    assert not {"clip_low", "clip_high"} & parts("--algorithm.preset", "m2po").keys()
    capped = parts("--algorithm.old_logprobs", "recomputed", "--training.updates", "2", "--algorithm.clip_high", "0.3")
    assert (capped["correction"], capped["weight_cap"], capped["clip_high"]) == ('"cap"', "2.0", "0.3  *")
    masked = parts("--algorithm.old_logprobs", "recomputed", "--algorithm.correction", "mask")
    assert (masked["old_logprobs"], masked["correction"]) == ('"recomputed"  *', '"mask"  *')
    assert (
        parts("--algorithm.old_logprobs", "recomputed", "--algorithm.correction", "none")["correction"] == '"none"  *'
    )
    assert parts("--algorithm.preset", "gspo")["weight_cap"] == "2.0"
    in_reward = ["--algorithm.kl", "0.1", "--algorithm.kl_in", "reward", "--algorithm.kl_estimator", "k1"]
    assert "clip_low" not in parts("--algorithm.preset", "sapo", *in_reward)
    taken = ["--algorithm.preset", "m2po", "--algorithm.loss", "clip", "--algorithm.second_moment", "none"]
    assert cli.main(["graph", str(path), *taken]) != 0
    assert "cannot be taken back" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ([], []),
        (["--model.lora.rank", "4"], ["adapters   rank 4, alpha 32, on all-linear: versions hold nothing else"]),
        (
            ["--model.lora.targets", '["q_proj", "v_proj"]', "--algorithm.kl", "0.01"],
            ["adapters   rank 16, alpha 32, on q_proj, v_proj", "reference  the trainer computes its log-probs"],
        ),
    ],
)
def test_graph_shows_what_adapters_change(
    flags: list[str], shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["graph", "quickstart", *flags]) == 0
    lines = [each for each in capsys.readouterr().out.splitlines() if each.startswith(("adapters ", "reference  "))]
    assert len(lines) == len(shown)
    assert all(line.startswith(start) for line, start in zip(lines, shown, strict=True))


@pytest.mark.parametrize(
    ("colocated", "way"),
    [
        (["colocate = 'training'", "[staleness]", "limit = 0"], "the ranks of the trainer sample between two steps"),
    ],
)
def test_graph_shows_no_slots_where_nothing_is_published(
    colocated: list[str], way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"

    def lines_of_weights(written: list[str], *flags: str) -> dict[str, str]:
        path.write_text("\n".join([TOML, "[generation]", *written]))
        assert cli.main(["graph", str(path), *flags]) == 0
        last = capsys.readouterr().out.rpartition("\n\n")[2].splitlines()
        return {line.split()[0]: line.split(maxsplit=1)[1] for line in last}

    apart = lines_of_weights([])
    assert apart["weights"].startswith("two slots: the trainer writes version v+1 beside v, which generation reads;")
    alone = lines_of_weights(colocated)
    assert alone["weights"].startswith(way)
    assert alone["transport"] == "none: nothing is published"
    assert "two slots" not in str(alone)
    evaluated = lines_of_weights(colocated, "--evaluate.prompts", "h")
    assert evaluated["weights"] == alone["weights"]
    assert evaluated["evaluation"] == "two slots: the trainer writes version v+1 beside v, which evaluation reads"
    assert evaluated["transport"] == apart["transport"]


def test_graph_shows_a_critic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    assert cli.main(["graph", str(path), "--algorithm.preset", "ppo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "mine: ppo on 4 services, 4 workers, one process each" in lines
    assert "algorithm  asyncrl.algorithms.ppo" in lines
    assert any(line.startswith("critic  (Critic: 1 x") for line in lines)
    assert {"values", "update"} <= {line.split()[0] for line in lines if line.startswith("    ")}


def test_graph_shows_costs_and_a_reward_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    flags = [
        "--algorithm.preset",
        "safe_rlhf",
        "--cost.functions",
        "length",
        "--cost.limit",
        "1",
        "--reward.model",
        "m",
    ]
    assert cli.main(["graph", str(path), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "mine: safe_rlhf on 6 services, 6 workers, one process each" in lines
    assert "algorithm  asyncrl.algorithms.safe_rlhf" in lines
    assert '    constraint = "lagrangian"' in lines
    services = {line.split()[0]: line for line in lines if "asyncrl.services" in line}
    assert services["reward"].endswith("asyncrl.services.reward_model:RewardModelService)")
    assert services["cost"].startswith("cost  (Reward: 1 x")
    assert services["cost"].endswith("asyncrl.services.reward:RewardService)")
    assert services["cost_critic"].startswith("cost_critic  (Critic: 1 x")


@pytest.mark.parametrize(
    ("algorithm", "says"), [("nofile.py:ALGORITHM", "nofile.py"), ("asyncrl.algorithms.ppo", 'write preset = "ppo"')]
)
def test_graph_refuses_an_algorithm_that_would_not_run(
    algorithm: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    assert cli.main(["graph", str(path), "--algorithm.custom", algorithm]) == 2
    found = capsys.readouterr()
    assert says in found.err
    assert not found.out


def test_graph_shows_the_algorithm_and_the_parts_of_the_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    own = ["--algorithm.preset", "dapo", "--algorithm.clip_high", "0.4", "--algorithm.entropy_bonus", "0.1"]
    assert cli.main(["graph", str(path), *own]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "algorithm  asyncrl.algorithms.grpo" in lines
    assert "paper      arXiv 2503.14476" in lines
    assert '    aggregation = "token_mean"' in lines
    assert "    clip_high = 0.4  * not 0.28" in lines
    assert "    entropy_bonus = 0.1  *" in lines
    assert not any(line.startswith("    dual_clip") for line in lines)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_is_a_flag_of_the_quickstart(preset: str) -> None:
    costs = ["--cost.limit", "0.5", "--cost.functions", "length"] if preset == "safe_rlhf" else []
    assert cli.main(["graph", "quickstart", "--algorithm.preset", preset, *costs]) == 0


@pytest.mark.parametrize("command", [["audit"], ["export"], ["evaluate"]])
def test_a_folder_that_is_no_run(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    target = [str(tmp_path / "target")] if command == ["export"] else []
    assert cli.main([*command, str(tmp_path / "empty"), *target]) == 2
    assert "asyncrl: " in capsys.readouterr().err
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("count", ["-3", "0", "x"])
def test_a_count_of_samples_is_positive(count: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["samples", str(run_dir), "-n", count]) == 2
    assert f"-n: must be a whole number of 1 or more, not '{count}'" in capsys.readouterr().err
