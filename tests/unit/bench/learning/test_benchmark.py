"""`asyncrl-bench learning` goes on where it stopped: with runs that cost nothing in place of real ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bench.learning import benchmark
from asyncrl.bench.learning.grid import Case, Values
from asyncrl.bench.learning.training_runs import RunFailed, TrainingChild

OUTCOME: dict[str, Any] = {
    "steps": 50,
    "held_out_before": 0.2,
    "held_out": 0.9,
    "held_out_stderr": 0.01,
    "cost": None,
    "reward_first": 0.2,
    "reward_last": 0.9,
    "seconds_to_goal": 10.0,
    "steps_to_goal": 20,
    "seconds": 25.0,
    "staleness_mean": 1.5,
    "staleness_max": 2.0,
    "masked": 0.0,
    "rejected": 0.0,
    "mismatch_kl": 0.0,
    "mismatch_ess": 1.0,
    "length_last": 5.0,
    "trained_by_decile": [1.0] * 10,
    "curve": [(1, 1.0, 0.2), (50, 25.0, 0.9)],
    "others": 0.0,
}


class Runs:
    """Stands in for `run_case`: remembers what was run; seeds of `failing` fail."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.failing: set[int] = set()

    def __call__(self, case: Case, defaults: Values, goal: float, folder: Path, child: TrainingChild) -> dict[str, Any]:
        self.seen.append(f"{case.row} {case.limit} {case.seed}")
        if case.seed in self.failing:
            raise RunFailed("Traceback ...\nFleetFailed: the trainer died")
        return OUTCOME


@pytest.fixture
def flags(tmp_path: Path, small_text: str) -> list[str]:
    (tmp_path / "grid.toml").write_text(small_text)
    (tmp_path / "docs").mkdir()
    places = {"grid": "grid.toml", "results": "results/it.jsonl", "docs": "docs", "folder": "folder"}
    return [part for name, place in places.items() for part in (f"--{name}", str(tmp_path / place))]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    fake = Runs()
    monkeypatch.setattr(benchmark, "run_case", fake)
    return fake


def test_what_is_there_is_not_run_again(flags: list[str], runs: Runs, tmp_path: Path) -> None:
    benchmark.main([*flags, "--only", "row=grpo", "limit=0"])
    assert runs.seen == ["grpo 0 0", "grpo 0 1"]
    benchmark.main([*flags, "--only", "row=grpo"])
    assert runs.seen[2:] == ["grpo 2 0", "grpo 2 1"]
    lines = [json.loads(line) for line in (tmp_path / "results/it.jsonl").read_text().splitlines()]
    assert [(line["task"], line["limit"], line["seed"]) for line in lines] == [
        ("quickstart", 0, 0),
        ("quickstart", 0, 1),
        ("quickstart", 2, 0),
        ("quickstart", 2, 1),
    ]
    assert "4 of 17 runs" in (tmp_path / "docs/learning.md").read_text()


def test_a_failure_is_written_down_and_the_others_are_run(
    flags: list[str], runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.failing = {0}
    benchmark.main([*flags, "--only", "row=grpo", "limit=0"])
    assert "quickstart, grpo, limit 0, seed 0: failed, Traceback" in capsys.readouterr().out
    assert "FleetFailed: the trainer died" in (tmp_path / "docs/learning.md").read_text()
    benchmark.main([*flags, "--only", "row=grpo", "limit=0"])
    assert runs.seen == ["grpo 0 0", "grpo 0 1"]
    runs.failing = set()
    benchmark.main([*flags, "--only", "row=grpo", "limit=0", "--again"])
    assert runs.seen[2:] == ["grpo 0 0"]
    assert "FleetFailed" not in (tmp_path / "docs/learning.md").read_text()


def test_nothing_is_begun_that_would_end_too_late(
    flags: list[str], runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark.main([*flags, "--minutes", "0.1"])
    assert runs.seen == []
    assert "the budget does not allow quickstart, grpo, limit 0, seed 0" in capsys.readouterr().out


def test_so_many_runs_and_no_more(flags: list[str], runs: Runs) -> None:
    benchmark.main([*flags, "--runs", "2"])
    assert runs.seen == ["grpo 0 0", "grpo 2 0"]
    benchmark.main([*flags, "--runs", "1"])
    assert runs.seen[2:] == ["rloo 0 0"]


@pytest.mark.parametrize(("flag", "writes"), [("--estimate", False), ("--report", True)])
def test_looking_runs_nothing(flag: str, writes: bool, flags: list[str], runs: Runs, tmp_path: Path) -> None:
    benchmark.main([*flags, flag])
    assert runs.seen == []
    assert (tmp_path / "docs/learning.md").exists() == writes


def test_the_proof_of_the_claim_follows_its_search_in_one_go(
    flags: list[str], runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here every stale run loses, so that the first candidate is chosen."""

    def run_case(case: Case, defaults: Values, goal: float, folder: Path, child: TrainingChild) -> dict[str, Any]:
        runs(case, defaults, goal, folder, child)
        return {**OUTCOME, "held_out": 0.9 if case.limit == 0 else 0.5}

    monkeypatch.setattr(benchmark, "run_case", run_case)
    benchmark.main([*flags, "--only", "table=search,claim"])
    assert len(runs.seen) == 8 + 6
    text = (tmp_path / "docs/learning.md").read_text()
    assert "Chosen: quickstart, as it is. The claim does not hold: of a loss of 0.400" in text


@pytest.mark.parametrize(
    ("only", "says"),
    [
        (["nosuch"], "--only nosuch: write one of table, task, row, limit, seed, =, and values with commas"),
        (["tabel=defaults"], "write one of table, task"),
        (["table=defaults,seed=0,1"], "separate names with a space, not a comma: --only table=defaults seed=0,1"),
        (["table=nosuch"], "--only table=nosuch: choose from defaults, search, claim"),
        (["task=quickstart,nosuch"], "--only task=nosuch: choose from quickstart"),
        (["row=grop"], "--only row=grop: choose from grpo, rloo, learning rate 0, quickstart, as it is, uncorrected,"),
        (["limit=0,3"], "--only limit=3: choose from 0, 2, 8"),
        (["seed=0,7"], "--only seed=7: choose from 0, 1, 100, 101"),
        (["table=defaults", "limit=8"], "--only table=defaults limit=8: no case of the grid has all"),
        (
            ["table=defaults", "--only", "limit=8"],
            "--only table=defaults limit=8: no case of the grid has all",
        ),
        (["table=claim"], "--only table=claim: no case of the grid has all"),
    ],
)
def test_what_is_not_in_the_grid_is_refused_and_no_document_touched(
    only: list[str], says: str, flags: list[str], runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main([*flags, "--only", *only])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
    assert runs.seen == []
    assert not list((tmp_path / "docs").iterdir())


def test_what_is_named_adds_up_over_flags(flags: list[str], runs: Runs) -> None:
    benchmark.main([*flags, "--only", "row=grpo", "--only", "limit=0", "seed=1"])
    assert runs.seen == ["grpo 0 1"]
