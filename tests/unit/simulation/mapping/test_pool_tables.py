"""The tables that a mapping is written as: an experiment takes them."""

import tomllib
from pathlib import Path

import pytest

from asyncrl.config.service_placement import assignment
from asyncrl.config.sources.load_config import read
from asyncrl.simulation.cost_model.gpus import known_gpus
from asyncrl.simulation.mapping.job_file import JobTables, planned
from asyncrl.simulation.mapping.pool_tables import pool_tables
from asyncrl.simulation.mapping.search import FoundMapping, MappingSearch


def best(hosts: int) -> FoundMapping:
    models = dict.fromkeys(("generation", "training"), "qwen2.5-1.5b")
    tables = {"models": models, "devices": [{"gpu": "A100", "hosts": hosts}], "objective": "asynchronous"}
    split = [
        each
        for each in MappingSearch(planned(JobTables.model_validate(tables), known_gpus())).best()
        if len(each.sets) == 2
    ]
    return split[0]


def test_an_experiment_with_the_tables_has_its_workers_on_the_devices(tmp_path: Path) -> None:
    found = best(1)
    path = tmp_path / "mapped.toml"
    path.write_text(
        'model.name = "none"\ntask.prompts = "words:"\nreward.functions = ["words:exact"]\n' + pool_tables(found)
    )
    workers = assignment(read(path))
    generation, training = (
        [place.device for each in workers[role] for place in each] for role in ("generation", "training")
    )
    assert set(generation).isdisjoint(training)
    assert len({*generation, *training}) == 8


def test_pools_of_several_hosts_name_them() -> None:
    pools = tomllib.loads(pool_tables(best(4)))["pools"]
    hosts = [host for pool in pools.values() for host in pool["hosts"]]
    assert len(hosts) == len(set(hosts)) == 4
    assert pools.keys() == {"generation", "training"}
    assert all(len(pool["devices"]) == 8 for pool in pools.values())


@pytest.mark.parametrize("hosts", [1, 4])
def test_the_tables_say_that_they_are_predicted(hosts: int) -> None:
    assert "s, predicted" in pool_tables(best(hosts))
