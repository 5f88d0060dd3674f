"""HybridFlow's algorithms 1 and 2 against brute force on small cases, and what holds for every mapping."""

import tomllib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import ceil, inf
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.placement import assignment
from asyncrl.config.sources.load_config import read
from asyncrl.errors import ConfigError
from asyncrl.simulation.planning import formulas
from asyncrl.simulation.planning.formulas import Degrees
from asyncrl.simulation.planning.gpus import known_gpus
from asyncrl.simulation.planning.job_file import JobTables, PlannedJob, planned
from asyncrl.simulation.planning.pool_tables import devices_of, pool_tables
from asyncrl.simulation.planning.predictions import USABLE
from asyncrl.simulation.planning.search import FoundMapping, MappingSearch, set_partitions, sizes
from asyncrl.simulation.planning.strategies import TRAINED, auto_parallel, weight_of

PPO = ("actor", "critic", "reference", "reward")
APART = ("generation", "training", "reward")


def job(models: dict[str, str], *devices: dict[str, Any], objective: str = "iteration", **work: Any) -> PlannedJob:
    tables = {"models": models, "devices": devices, "objective": objective, "work": {"samples": 64, **work}}
    return planned(JobTables.model_validate(tables), known_gpus())


def same(roles: Sequence[str], model: str) -> dict[str, str]:
    return dict.fromkeys(roles, model)


SMALL = {
    "three models": job(same(("actor", "critic", "reward"), "qwen2.5-1.5b"), {"gpu": "A100", "gpus": 4}),
    "two hosts": job(same(("actor", "critic"), "qwen3-4b"), {"gpu": "A100", "gpus": 4, "hosts": 2, "network": 3e9}),
    "overlapping": job(same(APART, "qwen3-4b"), {"gpu": "H100", "gpus": 8}, objective="asynchronous"),
    "limit 0": job(same(APART, "qwen3-4b"), {"gpu": "H100", "gpus": 8}, objective="asynchronous", limit=0),
    "scarce memory": job(same(("actor", "reference"), "llama-7b"), {"gpu": "A100", "gpus": 4}),
}


def degrees(job: PlannedJob, role: str, gpus: int) -> Iterator[Degrees]:
    size = job.sizes[role]
    each = job.groups[0].each
    for tp, pp in product(range(1, gpus + 1), repeat=2):
        if gpus % (tp * pp) == size.heads % tp == size.layers % pp == 0 and tp <= each and _power(tp) and _power(pp):
            yield Degrees(tp, pp, gpus // (tp * pp))


def _power(number: int) -> bool:
    return number & (number - 1) == 0


def brute_generation(job: PlannedJob, role: str, each: Degrees, free: float) -> float:
    """Returns seconds in which replicas generate with so many free bytes on each GPU; infinite without room."""
    size = job.sizes[role]
    rates = job.groups[0].gpu.likely
    work = job.work
    sequences = ceil(work.samples / each.dp)
    room = min(sequences, formulas.room_for(size, free - 2 * size.parameters / each.replica, work.tokens, each))
    lengths = work.prompt_tokens, work.response_tokens
    return formulas.generation_seconds(size, rates, sequences, *lengths, each, room) if room > 0 else inf


def brute_stages(job: PlannedJob, role: str, gpus: int, budget: float) -> tuple[float, float, float] | None:
    """Tries every layout of one role; of an actor, every layout of generation for the fastest one of training."""
    size = job.sizes[role]
    rates = job.groups[0].gpu.likely
    work = job.work
    length = work.tokens

    def train(each: Degrees) -> float:
        return formulas.training_seconds(size, rates, work.samples, length, each, work.updates)

    def score(each: Degrees) -> float:
        return formulas.scoring_seconds(size, rates, work.samples, length, each)

    def fits(each: Degrees) -> bool:
        count = formulas.training_bytes if role in TRAINED else formulas.scoring_bytes
        return count(size, each, length) <= budget

    layouts = list(degrees(job, role, gpus))
    if role == "generation":
        least = min((brute_generation(job, role, each, budget) for each in layouts), default=inf)
        return (least, 0.0, 0.0) if least < inf else None
    layouts = [each for each in layouts if fits(each)]
    if role == "actor":
        for each in sorted(layouts, key=train):
            free = budget - formulas.training_bytes(size, each, 0)
            inner = [g for g in degrees(job, role, gpus) if each.tp % g.tp == each.pp % g.pp == 0]
            moved = partial(formulas.transition_seconds, size, rates, each)
            found = [brute_generation(job, role, g, free) + moved(g) for g in inner]
            if (least := min(found)) < inf:
                return least, 0.0, train(each)
        return None
    if not layouts:
        return None
    both = {
        "critic": lambda each: (0.0, score(each), train(each)),
        "training": lambda each: (0.0, 0.0, train(each)),
    }.get(role, lambda each: (0.0, score(each), 0.0))
    return min(map(both, layouts), key=sum)


def brute_force(job: PlannedJob) -> float:
    """Tries every label of every role and every number of GPUs of every label."""
    roles = tuple(job.sizes)
    best = inf
    for labels in product(range(len(roles)), repeat=len(roles)):
        sets = [
            [role for role, label in zip(roles, labels, strict=True) if label == each] for each in sorted({*labels})
        ]
        for counts in product(sizes(job.groups[0]), repeat=len(sets)):
            if sum(counts) == job.count:
                best = min(best, brute_cost(job, sets, counts))
    return best


def brute_cost(job: PlannedJob, sets: Sequence[Sequence[str]], counts: Sequence[int]) -> float:
    rows = []
    for roles, gpus in zip(sets, counts, strict=True):
        weights = {role: weight_of(role, job.sizes[role]) for role in roles}
        whole = USABLE * job.groups[0].gpu.memory
        found = [brute_stages(job, role, gpus, whole * weights[role] / sum(weights.values())) for role in roles]
        if None in found:
            return inf
        rows.append([sum(each[stage] for each in found if each) for stage in range(3)])
    cycle = sum(max(row[stage] for row in rows) for stage in range(3))
    if job.tables.objective == "iteration":
        return cycle
    return max(cycle / (job.work.limit + 1), max(map(sum, rows)))


@pytest.mark.parametrize("name", SMALL)
def test_the_search_finds_what_brute_force_finds(name: str) -> None:
    search = MappingSearch(SMALL[name])
    assert search.best()[0].cost == pytest.approx(brute_force(SMALL[name]), rel=1e-12)


def test_four_models_have_fifteen_placements() -> None:
    found = list(set_partitions(PPO))
    assert len({frozenset(map(frozenset, sets)) for sets in found}) == len(found) == 15
    assert len(list(set_partitions(range(5)))) == 52


MIXED = (
    job(same(PPO, "llama-13b"), {"gpu": "A100", "hosts": 8}),
    job(same(PPO, "llama-7b"), {"gpu": "H100", "hosts": 2}, {"gpu": "A100", "hosts": 3}, {"gpu": "H20", "hosts": 1}),
    job(
        same(APART, "qwen3-30b-a3b"), {"gpu": "H200", "hosts": 3}, {"gpu": "H20", "hosts": 4}, objective="asynchronous"
    ),
    job(same(PPO, "qwen2.5-1.5b"), {"gpu": "A100", "hosts": 1}),
)


@pytest.mark.parametrize("mixed", MIXED)
def test_every_mapping_uses_each_device_once_and_fits_into_memory(mixed: PlannedJob) -> None:
    for found in MappingSearch(mixed).best():
        used = [(host, number) for hosts in devices_of(found) for host, numbers in hosts.items() for number in numbers]
        assert len(used) == len(set(used)) <= mixed.count
        hosts = {host: group for group in mixed.groups for host in group.hosts}
        assert all(number < hosts[host].each for host, number in used)
        for placed, places in zip(found.sets, devices_of(found), strict=True):
            assert sum(map(len, places.values())) == placed.gpus
            assert {hosts[host].name for host in places} == {placed.group.name}
            assert sum(each.bytes for each in placed.strategies) <= USABLE * placed.group.gpu.memory
            for strategy in placed.strategies:
                assert strategy.degrees.gpus in (0, placed.gpus)
                assert not strategy.room or strategy.generate.gpus == placed.gpus
        assert sorted(role for placed in found.sets for role in placed.roles) == sorted(mixed.sizes)


def test_the_best_mapping_is_best_at_its_own_cost_and_has_an_interval() -> None:
    found = MappingSearch(MIXED[0]).best()
    assert [each.cost for each in found] == sorted(each.cost for each in found)
    assert found[0].predicted.low < found[0].cost < found[0].predicted.high
    assert found[0].predicted.likely == pytest.approx(found[0].cost)


def test_memory_bound_generation_goes_to_the_gpus_with_bandwidth() -> None:
    """H20 computes a seventh of what H200 does and reads nearly as fast."""
    best = MappingSearch(
        job(
            same(("generation", "training"), "qwen2.5-7b"),
            {"gpu": "H200", "hosts": 2},
            {"gpu": "H20", "hosts": 2},
            objective="asynchronous",
            samples=1024,
        )
    ).best()[0]
    assert {placed.roles: placed.group.name for placed in best.sets} == {("generation",): "H20", ("training",): "H200"}


def test_strategies_of_a_role_are_computed_once_for_all_placements() -> None:
    search = MappingSearch(job(same(("reference", "reward", "cost", "actor"), "qwen2.5-1.5b"), {"gpu": "A100"}))
    search.best()
    looked_up = search.looked_up
    search.best()
    assert search.looked_up == looked_up


def test_thousand_gpus_are_searched_with_bounded_work() -> None:
    """PPO on 1,024 GPUs: 0.6 s of CPU time on the machine of docs/log.md."""
    search = MappingSearch(job(same(PPO, "llama-7b"), {"gpu": "A100", "hosts": 128}, samples=1024))
    search.best()
    assert search.considered < 10_000_000
    assert search.looked_up < 4_000


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="fit on 1 GPUs in no placement: add GPUs, or take smaller models"):
        MappingSearch(job(same(PPO, "llama-70b"), {"gpu": "A100", "gpus": 1})).best()
    with pytest.raises(ConfigError, match="name an actor, or generation and training"):
        job({"critic": "llama-7b"}, {"gpu": "A100"})


def test_a_layout_that_the_job_fixes_is_taken() -> None:
    size = MIXED[0].sizes["actor"]
    gpu = known_gpus()["A100"]
    found = auto_parallel("actor", size, 16, 72e9, gpu, MIXED[0].work, (8, 2))
    assert found is not None
    assert (found.degrees.tp, found.degrees.pp) == (8, 2)


class TestPaper:
    """HybridFlow 8.3 on A100s with 200 Gb/s a host, layouts of its section 8.4."""

    @staticmethod
    def placements(gpus: int) -> tuple[FoundMapping, list[FoundMapping]]:
        models = same(PPO, "llama-34b")
        tables = {
            "models": models,
            "devices": [{"gpu": "A100", "hosts": gpus // 8, "network": 25e9 / 8}],
            "layouts": dict.fromkeys(models, (8, 4)),
            "work": {"samples": 1024, "updates": 8},
        }
        found = MappingSearch(planned(JobTables.model_validate(tables), known_gpus())).best()
        return found[0], found

    @pytest.mark.parametrize("gpus", [32, 64])
    def test_few_gpus_are_best_shared_by_all_models(self, gpus: int) -> None:
        best, _ = self.placements(gpus)
        assert len(best.sets) == 1

    def test_many_gpus_are_best_split_in_halves(self) -> None:
        best, found = self.placements(128)
        assert sorted(placed.gpus for placed in best.sets) == [64, 64]
        assert best.cost < next(each.cost for each in found if len(each.sets) == 1)


# The tables that a mapping is written as: an experiment takes them.
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
