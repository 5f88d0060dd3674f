"""Half a minute of chaos on three network hosts, one fault after the other; scripts/chaos does more of it."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.chaos_command import FLAGS
from tests.chaos.faults import KINDS, draw
from tests.chaos.fleet_on_hosts import fleet_on_hosts
from tests.chaos.outcome import Outcome
from tests.chaos.trial import Trial
from tests.network_hosts import why_no_hosts

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(240)]

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
