"""A report reads the steps that count, time over resumes and devices, and refuses what it cannot read."""

from pathlib import Path

import pytest

from asyncrl.deploy.report.report_page import facts
from asyncrl.deploy.report.run_record import read_run
from asyncrl.errors import ConfigError
from tests.unit.deploy.report.recorded_runs import recorded_run, step


def test_time_goes_on_over_a_resume_and_counts_the_steps_that_were_trained_again(tmp_path: Path) -> None:
    lines = [step(1, 10.0), step(2, 20.0), step(3, 30.0), step(3, 5.0, 1), step(4, 15.0, 1), step(5, 2.0, 2)]
    run = read_run(recorded_run(tmp_path / "run", lines))
    assert [each["step"] for each in run.steps] == [1, 2, 3, 4, 5]
    assert run.seconds == [10.0, 20.0, 35.0, 45.0, 47.0]


def test_of_the_evaluations_of_a_version_the_newest_counts(tmp_path: Path) -> None:
    evaluations = [{"version": 10, "mean": 0.1}, {"version": 0, "mean": 0.0}, {"version": 10, "mean": 0.2}]
    run = read_run(recorded_run(tmp_path / "run", [step(1, 1.0)], evaluations=evaluations))
    assert [(each["version"], each["mean"]) for each in run.evaluations] == [(0, 0.0), (10, 0.2)]


def test_a_report_shows_the_unnamed_set_of_several(tmp_path: Path) -> None:
    evaluations = [{"version": 0, "mean": 0.5, "name": "hard"}, {"version": 0, "mean": 0.1, "name": ""}]
    run = read_run(recorded_run(tmp_path / "run", [step(1, 1.0)], evaluations=evaluations))
    assert [each["mean"] for each in run.evaluations] == [0.1]
    assert [fact.texts for fact in facts([run]) if fact.name == "held out, hard"] == [("0.500 ± 0.000 at version 0",)]
    run = read_run(recorded_run(tmp_path / "named", [step(1, 1.0)], evaluations=evaluations[:1]))
    assert [each["mean"] for each in run.evaluations] == [0.5]
    said = {fact.name: fact.texts for fact in facts([run]) if fact.name.startswith("held out")}
    assert said == {"held out, hard": ("0.500 ± 0.000 at version 0",)}, "its number stands there once"


def test_a_journal_that_is_not_there_is_said_in_place_of_the_audit(tmp_path: Path) -> None:
    run = read_run(recorded_run(tmp_path / "run", [step(1, 1.0)]))
    assert run.audit is None
    assert "holds no journal" in run.audit_text


@pytest.mark.parametrize(
    ("sections", "devices"),
    [
        ({}, 1),
        ({"generation": {"device": "cuda:0"}, "training": {"device": "cuda:1"}}, 3),
        ({"generation": {"device": "cuda:0"}, "training": {"device": "cuda:0"}}, 2),
        (
            {
                "pools": {"gpus": {"devices": ["cuda:0", "cuda:1"]}},
                "training": {"pool": "gpus"},
                "generation": {"pool": "gpus", "replicas": 2},
            },
            3,
        ),
        (
            {
                "fleet": {"wire": "tcp", "listen": "tcp://127.0.0.1:7000", "joined": {"generation": 2}},
                "generation": {"replicas": 2, "device": "cuda:0"},
            },
            3,
        ),
    ],
)
def test_gpus_are_counted_and_the_cpus_of_a_host_are_one_device(
    tmp_path: Path, sections: dict[str, object], devices: int
) -> None:
    assert read_run(recorded_run(tmp_path / "run", [step(1, 1.0)], **sections)).devices == devices


def test_what_holds_no_trained_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run: name a run directory"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="has not trained a step"):
        read_run(recorded_run(tmp_path / "run", []))
