"""Half a minute of chaos on three network hosts, one fault after the other; scripts/chaos does more of it."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.chaos_command import FLAGS
from tests.chaos.faults import KINDS, Fault, draw
from tests.chaos.fleet_on_hosts import fleet_on_hosts
from tests.chaos.injection import Injected
from tests.chaos.outcome import Outcome, caused
from tests.chaos.run_watch import Loss, RunWatch
from tests.chaos.trial import Trial
from tests.network_hosts import why_no_hosts

pytestmark = [pytest.mark.fleet, pytest.mark.kills]

CHEAP = tuple(kind for kind in KINDS if kind.seconds[1] <= 8 and not kind.is_outage)
SEED = 3


def test_the_same_seed_draws_the_same_faults() -> None:
    one, same, other = (list(zip(range(50), draw(seed, 5.0), strict=False)) for seed in (1, 1, 2))
    assert one == same != other
    assert {fault.kind.name for _, fault in zip(range(3000), draw(1, 5.0), strict=False)} == {k.name for k in KINDS}


def test_a_fleet_on_three_hosts_survives_some_faults(quickstart_model: Path, tmp_path: Path) -> None:
    if why := why_no_hosts():
        pytest.skip(why)
    with fleet_on_hosts(tmp_path, "quickstart", [*FLAGS, "--model.name", str(quickstart_model)]) as fleet:
        trial = Trial(fleet, SEED, seconds=25.0, longest_pause=3.0, kinds=CHEAP)
        asyncio.run(trial.run())
    outcome = Outcome(trial, tmp_path / "run", fleet.shown)
    assert outcome.problems == []
    assert len(outcome.costs) >= 5
    assert len({cost.done.fault.kind for cost in outcome.costs}) >= 3
    assert fleet.run.exits == {0: 1}, "no worker's death ends the run"
    assert fleet.controllers == 1


def test_a_loss_counts_for_the_fault_that_explains_it() -> None:
    kinds = {kind.name: kind for kind in KINDS}
    cut = Injected(Fault(kinds["partition of a host, 1 s"], (2,), (), 1.0, 0.5, 0, 1.0), 10.0, 11.0)
    kill = Injected(Fault(kinds["kill -9 of a reward worker"], (2,), ("reward",), 0.0, 0.5, 0, 1.0), 15.0, 15.0)
    outage = Injected(Fault(kinds["kill -9 of the controller"], (1,), ("controller",), 0.0, 0.5, 0, 1.0), 30.0, 30.0)
    faults = [cut, kill, outage]
    for loss, cause in (
        (Loss(19.9, "h2"), cut),
        (Loss(15.2, "h2"), kill),
        (Loss(31.0, "h3"), outage),
        (Loss(19.9, "h3"), None),
        (Loss(20.1, "h2"), None),
    ):
        assert [each for each in faults if caused(each, faults, loss)] == [each for each in (cause,) if each]


def test_recovery_lasts_until_the_last_of_the_lost_workers_takes_calls(tmp_path: Path) -> None:
    watch = RunWatch(tmp_path, 2)
    watch.lost["reward0"] = [Loss(5.0, "h2")]
    watch.lost["reward1"] = [Loss(5.5, "h2")]
    watch.started["reward0"] = [1.0, 6.0]
    assert watch.replaced(5.0, lambda loss: True) is None
    watch.started["reward1"] = [1.0, 8.5]
    assert watch.replaced(5.0, lambda loss: True) == 3.5
    assert watch.replaced(5.0, lambda loss: False) == 0
