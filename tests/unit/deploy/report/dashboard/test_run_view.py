"""The dashboard shows runs from the files that they write."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.deploy.report.dashboard.recorded_samples import PAGE, LineTail
from asyncrl.deploy.report.dashboard.shown_runs import LATE, RunView, find_runs, state_of
from asyncrl.errors import ConfigError
from asyncrl.telemetry.jsonl import LineFile
from asyncrl.telemetry.run_status import RunStatus, WorkerStatus, write_status
from asyncrl.telemetry.samples_file import SampleRecord
from tests.unit.deploy.report.recorded_runs import SAMPLE, recorded_run, step

NOW = 1e9
WORKER = WorkerStatus("generation0.0", "a", "", ("x",), 0, {"busy": 1.0}, 1.0, 5, 1, {}, service="generation")


def status(path: Path, **changes: Any) -> None:
    write_status(path / "status.json", replace(RunStatus(NOW - 1, 3, 9, {"ready": 2}, (WORKER,)), **changes))


def append(path: Path, *lines: dict[str, Any]) -> None:
    file = LineFile(path)
    for line in lines:
        file.append(line)
    file.close()


def viewed(path: Path) -> RunView:
    return RunView(path, path.name, lambda: NOW)


def rows(view: RunView, before: int | None = None) -> list[dict[str, Any]]:
    samples = view.samples()
    assert samples is not None
    samples.look()
    found: list[dict[str, Any]] = samples.page(before)["groups"]
    return found


def group(view: RunView, number: int, group: int) -> list[dict[str, Any]]:
    """Returns the samples of a group. Raises KeyError where it is not recorded."""
    samples = view.samples()
    assert samples is not None
    return list((samples.group(number, group) or {})["samples"])


# ---- files that grow -------------------------------------------------------------------------------------


def test_only_what_was_appended_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = LineTail(path)
    assert list(tail.new()) == [], "before there is a file"
    append(path, {"a": 1}, {"b": "ü"})
    assert [line for _, _, line in tail.new()] == [{"a": 1}, {"b": "ü"}]
    assert list(tail.new()) == []
    with path.open("ab") as file:
        file.write(b'{"c": 3}\nno JSON\n[1]\n{"torn": ')
    assert [line for _, _, line in tail.new()] == [{"c": 3}]
    assert tail.damaged == 2
    with path.open("ab") as file:
        file.write(b"4}\n")
    ((place, length, line),) = tail.new()
    assert line == {"torn": 4}
    assert json.loads(path.read_bytes()[place : place + length]) == line


def test_a_file_that_became_shorter_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, {"a": 1}, {"a": 2})
    tail = LineTail(path)
    assert len(list(tail.new())) == 2
    path.unlink()
    append(path, {"a": 3})
    assert [line for _, _, line in tail.new()] == [{"a": 3}]
    assert tail.restarts == 1


def test_of_a_large_file_the_end_is_read_and_never_more_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.deploy.report.dashboard.recorded_samples.FIRST_BYTES", 100)
    monkeypatch.setattr("asyncrl.deploy.report.dashboard.recorded_samples.BYTES_AT_ONCE", 60)
    path = tmp_path / "samples.jsonl"
    append(path, *({"a": number} for number in range(1000)))
    tail = LineTail(path)
    found = list[int]()
    while new := [line["a"] for _, _, line in tail.new()]:
        assert len(new) <= 6
        found += new
    assert found == [*range(1000 - len(found), 1000)]
    assert 8 <= len(found) <= 10


# ---- a run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "training"),
        ({"paused": True}, "paused"),
        ({"ended": True, "written_at": 0.0}, "ended"),
        ({"paused": True, "written_at": NOW - LATE - 1}, "silent"),
    ],
)
def test_the_state_of_a_run_is_one_word(tmp_path: Path, changes: dict[str, Any], state: str) -> None:
    path = recorded_run(tmp_path / "run", [step(1, 1.0)])
    assert viewed(path).row()["state"] == state_of(None, NOW) == "starting"
    status(path, **changes)
    seen = viewed(path).look()
    assert (seen["state"], seen["version"], seen["steps"]) == (state, 3, 9)
    assert len(seen["workers"]) == (state != "ended")


def test_a_run_shows_its_newest_numbers_and_its_curves(tmp_path: Path) -> None:
    path = recorded_run(tmp_path / "run", [step(n, n, **{"reward/mean": n / 10}) for n in (1, 2, 3)])
    status(path)
    view = viewed(path)
    assert [curve["points"] for curve in view.look()["curves"]] == [[[1, 0.1], [2, 0.2], [3, 0.3]]]
    append(path / "metrics.jsonl", step(2, 1.0, 1, **{"reward/mean": 0.7, "perf/tokens_per_s": float("nan")}))
    seen = view.look()
    assert [curve["points"] for curve in seen["curves"]] == [[[1, 0.1], [2, 0.7]]], "a resume repeats step 2"
    assert ("reward", "0.700") in seen["numbers"]
    assert json.loads(json.dumps(seen))["experiment"].endswith(", m")


def test_a_run_that_acts_shows_curves_of_episodes(tmp_path: Path) -> None:
    acted = {"acting/transitions": 64.0, "acting/return_last20": 20.0, "reward/mean": 3.0, "staleness/mean": 1.0}
    path = recorded_run(tmp_path / "run", [step(1, 1.0, **acted)])
    status(path)
    titles = [curve["title"] for curve in viewed(path).look()["curves"]]
    assert titles[:2] == ["Return of episodes, mean of the last 20", "Staleness of trained transitions, versions"]
    assert not [title for title in titles if "token" in title or "Reward" in title]


def test_a_damaged_state_is_shown_as_such(tmp_path: Path) -> None:
    path = recorded_run(tmp_path / "run", [step(1, 1.0)])
    (path / "status.json").write_text("{")
    seen = viewed(path).look()
    assert seen["state"] == "damaged"
    assert "status.json is damaged" in seen["problem"]


# ---- samples ---------------------------------------------------------------------------------------------


def sample(number: int, group: int, member: int, **changes: Any) -> SampleRecord:
    return replace(SAMPLE, step=number, group=group, member=member, **changes)


def test_groups_are_listed_newest_first_with_their_siblings(tmp_path: Path) -> None:
    samples = [sample(n, 10 + n, member, reward=member / 2) for n in range(1, PAGE + 3) for member in (0, 1)]
    view = viewed(recorded_run(tmp_path / "run", [step(1, 1.0)], samples))
    first = rows(view)
    assert [row["step"] for row in first] == [*range(PAGE + 2, 2, -1)]
    assert (first[0]["rewards"], first[0]["mean"]) == ([0.0, 0.5], 0.25)
    assert [row["step"] for row in rows(view, 2)] == [2, 1]
    assert [each["member"] for each in group(view, 5, 15)] == [0, 1]
    with pytest.raises(KeyError):
        group(view, 5, 16)


def test_a_step_that_a_resume_repeated_counts_once(tmp_path: Path) -> None:
    samples = [sample(1, 1, 0), sample(2, 2, 0), sample(3, 3, 0), sample(2, 9, 0, incarnation=1)]
    path = recorded_run(tmp_path / "run", [step(1, 1.0)], samples)
    view = viewed(path)
    assert [(row["step"], row["group"]) for row in rows(view)] == [(2, 9), (1, 1)]
    append(path / "samples.jsonl", {"step": 3}, sample(3, 4, 0, incarnation=1).fields())
    assert [(row["step"], row["group"]) for row in rows(view)] == [(3, 4), (2, 9), (1, 1)], (
        "a line of others is left out"
    )


def test_an_episode_keeps_its_turns_and_their_rewards(tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": "left"}, {"role": "user", "content": "wall"}]
    path = recorded_run(tmp_path / "run", [step(1, 1.0)], [sample(1, 1, 0, turns=turns, turn_rewards=[0.5])])
    view = viewed(path)
    assert rows(view)[0]["episode"] is True
    (shown,) = group(view, 1, 1)
    assert (shown["turns"], shown["turn_rewards"]) == (turns, [0.5])


# ---- the list --------------------------------------------------------------------------------------------


def test_runs_are_found_in_a_folder_and_by_their_own_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder: name a run directory, or a folder that holds some"):
        find_runs([tmp_path / "none"])
    with pytest.raises(ConfigError, match="holds no run yet"):
        find_runs([tmp_path])
    one = recorded_run(tmp_path / "runs" / "one", [step(1, 1.0)])
    two = recorded_run(tmp_path / "runs" / "two", [step(1, 1.0)])
    same = recorded_run(tmp_path / "one", [step(1, 1.0)])
    status(one, written_at=time.time())
    assert [*find_runs([tmp_path / "runs"])] == ["one", "two"], "what was touched last comes first"
    assert find_runs([two]) == {"two": two}
    assert {*find_runs([one, same, two])} == {str(one), str(same), "two"}
