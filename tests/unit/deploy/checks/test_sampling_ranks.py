"""Ranks of the trainer that sample in groups: which of them are together, and what plans say about them."""

from typing import Any

import pytest

from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import Config
from asyncrl.deploy.checks.memory_needs import needs
from asyncrl.deploy.commands.graph import graph
from asyncrl.deploy.service_specs import service_specs, worker_count
from asyncrl.engines.models.model_shape import PACKAGED
from asyncrl.engines.ranks.rank_limits import sampling_ranks
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.protocols.rank_layout import Layout

GPUS = {"gpus": {"devices": [f"cuda:{number}" for number in range(4)]}}


def config(layout: dict[str, int], tp: int = 2, **sections: Any) -> Config:
    generation = {"colocate": "training", "layout": {"tp": tp}} | sections.pop("generation", {})
    training = {"layout": layout} | sections.pop("training", {})
    base = {"model": {"name": "pypi:smollm2"}, "task": {"prompts": "none"}, "staleness": {"limit": 0}}
    return Config.model_validate({**base, "generation": generation, "training": training, **sections})


def specs(config: Config) -> dict[str, ServiceSpec]:
    return {spec.name: spec for spec in service_specs(config)}


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ({"tp": 4}, [[0, 2], [1, 3]]),
        ({"tp": 2}, [[0, 1]]),
        ({"pp": 2, "tp": 2}, [[0, 1], [2, 3]]),
        ({"tp": 4, "dp": 2}, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_ranks_that_sample_together_have_one_replica(layout: dict[str, int], ranks: list[list[int]]) -> None:
    wanted = config(layout)
    assert sampling_ranks(wanted) == ranks
    generation = specs(wanted)["generation"]
    assert (generation.replicas, generation.layout, generation.inside_ranks) == (len(ranks), Layout(tp=2), ranks)
    assert worker_count(wanted) == wanted.training.layout.size + 1, "generation has no process of its own"
    assert GateConfig.of(wanted).slots == len(ranks) * wanted.generation.slots


def test_ranks_gather_what_they_sample_with() -> None:
    """The trainer's layout tells with whom each rank gathers."""
    assert specs(config({"tp": 4}))["training"].layout.groups("gathering") == [[0, 1], [2, 3]]


def test_each_rank_alone_has_a_replica_by_default() -> None:
    for layout in ({"sp": 2}, {"shard": 2}, {"pp": 2, "tp": 2}):
        wanted = config(layout, tp=1)
        assert sampling_ranks(wanted) == [[rank] for rank in range(wanted.training.layout.size)]


def test_a_worker_samples_on_the_device_of_the_rank_that_it_is_in() -> None:
    wanted = config({"tp": 4}, pools=GPUS, training={"device": "cuda", "pool": "gpus", "layout": {"tp": 4}})
    found = specs(wanted)
    assert found["training"].devices == [("cuda:0",), ("cuda:1",), ("cuda:2",), ("cuda:3",)]
    assert found["generation"].devices == [("cuda:0",), ("cuda:2",), ("cuda:1",), ("cuda:3",)]


def test_stages_that_sample_together_stand_as_far_apart_as_those_that_train_the_layers_between() -> None:
    for layout, pp, ranks in (
        ({"pp": 2, "tp": 2}, 2, [[0, 1, 2, 3]]),
        ({"pp": 4}, 2, [[0, 2], [1, 3]]),
        ({"pp": 2, "dp": 2}, 2, [[0, 1], [2, 3]]),
    ):
        wanted = config(layout, generation={"layout": {"pp": pp, "tp": layout.get("tp", 1)}})
        assert sampling_ranks(wanted) == ranks
        generation = specs(wanted)["generation"]
        trained = specs(wanted)["training"].layout
        assert (generation.replicas, generation.layout.size) == (len(ranks), len(ranks[0]))
        assert (trained.gpp, trained.gtp) == (pp, layout.get("tp", 1))


def test_the_graph_shows_the_groups() -> None:
    for layout, pp, shape in (({"tp": 4}, 1, "2 x [pp 1 x tp 2"), ({"pp": 2, "tp": 2}, 2, "1 x [pp 2 x tp 2")):
        lines = list(graph(config(layout, generation={"layout": {"pp": pp, "tp": 2}})))
        assert any(line.startswith(f"generation  (Generation: {shape} x dp 1]") for line in lines)


def test_a_critic_of_one_rank_is_planned_beside_groups_of_two() -> None:
    found = needs(config({"tp": 2}, algorithm={"preset": "ppo", "kl": 0.01}), PACKAGED["pypi:smollm2"])
    assert {"training", "critic"} <= {each.name for each in found}
