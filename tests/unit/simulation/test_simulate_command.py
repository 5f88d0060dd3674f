"""A trial that fails is reported with the command that runs it again, whatever its error is, and shrunk: what has
nothing to do with the failure goes away, what it needs stays."""

import asyncio
import random
import subprocess
import sys
from typing import Any

import pytest

from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.observers.events import GroupFinished
from asyncrl.simulation import virtual_loop
from asyncrl.simulation.faults.fault_injection import AGE_LIMIT, AGE_LIMIT_PER_FAULT, FaultInjection
from asyncrl.simulation.faults.simulate_command import (
    candidates,
    command,
    described,
    kind_of,
    main,
    outcome_of,
    shrink,
)
from asyncrl.simulation.faults.trial_execution import WaitChecks
from asyncrl.simulation.faults.trial_plan import Fault, Trial, draw_trial
from asyncrl.simulation.faults.trial_services import GroundTruth

TRIAL = Trial(seed=3, steps=4)


def broken(patch: pytest.MonkeyPatch, failure: Any) -> None:
    """Makes every run fail in its third step."""
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


def endless() -> None:
    while True:
        pass


def test_any_error_is_a_failure_and_is_reported_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(monkeypatch, missing)
    assert main(["--seeds", "50", "--start", "20"]) == 1
    shown = capsys.readouterr().out
    assert "failed: FileNotFoundError in test_simulate_command.py:missing: journal" in shown
    assert "run it again: .venv/bin/python -c" in shown
    assert "faults=()" in shown, "it fails without any"


def test_episodes_are_drawn_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2"]) == main(["--seeds", "2", "--episodes"]) == 0
    answers, episodes = capsys.readouterr().out.splitlines()
    assert answers != episodes


def test_failures_at_different_places_are_of_different_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, missing)
    one = kind_of(outcome_of(TRIAL))
    monkeypatch.undo()
    broken(monkeypatch, divided)
    assert one != kind_of(outcome_of(TRIAL)) != ""
    monkeypatch.undo()
    assert kind_of(outcome_of(TRIAL)) == ""


def test_a_trial_that_computes_without_end_is_stopped_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, endless)
    shown = described(outcome_of(TRIAL, cpu_limit=1.0))
    assert "test_simulate_command.py" in shown
    assert "EndlessTrial" in shown


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


CULPRIT = Fault("kill", 40, "training", turns=3)


def fails_after_a_death_of_the_trainer(trial: Trial) -> str:
    return "Wrong" if any(fault.target == "training" for fault in trial.faults) and trial.steps >= 2 else ""


def test_what_is_left_is_what_the_failure_needs() -> None:
    noise = tuple(fault for fault in draw_trial(7).faults if fault.target != "training")
    trial = Trial(seed=7, groups=2, members=3, steps=4, remote=True, latency=0.1, faults=(*noise, CULPRIT, *noise))
    small = shrink(trial, fails_after_a_death_of_the_trainer)
    assert small.faults == (Fault("kill", 40, "training"),)
    assert (small.steps, small.groups, small.members, small.remote, small.latency) == (2, 1, 2, False, 0.0)
    assert small.seed == 7


def test_a_trial_that_fails_in_another_way_is_not_what_is_looked_for() -> None:
    def fails(trial: Trial) -> str:
        return "Wrong" if trial.remote else "Deadlock"

    assert shrink(Trial(remote=True, latency=0.1), fails).remote


def test_every_candidate_is_simpler_in_one_way() -> None:
    trial = draw_trial(3)
    assert all(each != trial and each.seed == trial.seed for each in candidates(trial))
    assert list(candidates(shrink(trial, lambda _: "Wrong"))) == []


# How long a group may be in flight before a trial fails, without faults and after one.
ANOTHER = GroupFinished(8)
LOSE = Fault("lose", 1)


def reach_age(seconds: float, *injected: Fault) -> None:
    """Lets group 7 be in flight for so many seconds after these faults. Raises AssertionError when that is too long."""

    async def main() -> None:
        trial = Trial()
        faults = FaultInjection(trial, GroundTruth(trial, random.Random(0)))
        checks = WaitChecks(faults, [7])
        faults.injected += injected
        await asyncio.sleep(seconds)
        checks.observe(ANOTHER)

    virtual_loop.run(main())


@pytest.mark.parametrize("faults", [(), (LOSE,), (LOSE, LOSE)])
def test_each_fault_lengthens_the_age_that_a_group_may_reach(faults: tuple[Fault, ...]) -> None:
    limit = AGE_LIMIT + AGE_LIMIT_PER_FAULT * len(faults)
    reach_age(limit, *faults)
    with pytest.raises(AssertionError, match=f"group 7 has been in flight for {limit + 1:g} s"):
        reach_age(limit + 1, *faults)


def test_a_finished_group_has_no_age() -> None:
    async def main() -> None:
        trial = Trial()
        checks = WaitChecks(FaultInjection(trial, GroundTruth(trial, random.Random(0))), [7])
        checks.observe(GroupFinished(7))
        await asyncio.sleep(2 * AGE_LIMIT)
        checks.observe(ANOTHER)

    virtual_loop.run(main())
