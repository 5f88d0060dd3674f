"""Failures of trials: each is told with how it can be had again, whatever it is."""

import subprocess
import sys
from typing import Any

import pytest

from asyncrl.faulty.cli import main
from asyncrl.faulty.failing import command, described, kind_of, outcome_of
from asyncrl.faulty.plan import Trial
from asyncrl.staleness import Gate

TRIAL = Trial(seed=3, steps=4)


def broken(patch: pytest.MonkeyPatch, failure: Any) -> None:
    """Something happens in the third step."""
    whole = Gate.trained

    def trained(gate: Gate, cuts: Any, version: int) -> None:
        if version == 3:
            failure()
        whole(gate, cuts, version)

    patch.setattr(Gate, "trained", trained)


def missing() -> None:
    raise FileNotFoundError("journal")


def divided() -> None:
    raise FileNotFoundError("another journal")


def for_ever() -> None:
    while True:
        pass


def test_any_error_is_a_failure_and_is_told_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(monkeypatch, missing)
    assert main(["--seeds", "50", "--start", "20"]) == 1
    told = capsys.readouterr().out
    assert "failed: FileNotFoundError in test_failing.py:missing: journal" in told
    assert "again: .venv/bin/python -c" in told
    assert "faults=()" in told, "it fails without any"


def test_failures_at_different_places_are_of_different_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, missing)
    one = kind_of(outcome_of(TRIAL))
    monkeypatch.undo()
    broken(monkeypatch, divided)
    assert one != kind_of(outcome_of(TRIAL)) != ""
    monkeypatch.undo()
    assert kind_of(outcome_of(TRIAL)) == ""


def test_a_trial_that_computes_for_ever_ends_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, for_ever)
    assert "test_failing.py" in described(outcome_of(TRIAL, patience=1.0))
    assert "Endless" in described(outcome_of(TRIAL, patience=1.0))


def test_the_same_seeds_print_the_same_digest(capsys: pytest.CaptureFixture[str]) -> None:
    digests = []
    for start in (5, 5, 6):
        assert main(["--seeds", "3", "--start", str(start)]) == 0
        digests.append(capsys.readouterr().out.split()[-1])
    assert digests[0] == digests[1] != digests[2]


def test_the_printed_command_runs_the_trial() -> None:
    _, option, code = command(TRIAL).split(" ", 2)
    run = subprocess.run([sys.executable, option, code.strip('"')], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
