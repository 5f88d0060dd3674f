"""Workers get devices of their pools: each a GPU of its own, evenly, and always the same."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.sections.device_pools import CPU, Demand, Device, DevicePlace, DevicePool, Host, assign
from asyncrl.errors import ConfigError
from asyncrl.protocols.rank_layout import Layout
from tests import golden

GPUS = tuple(Device(f"cuda:{number}") for number in range(8))


def gpu(number: int, host: str = "") -> tuple[DevicePlace, ...]:
    return (DevicePlace(host, GPUS[number]),)


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, DevicePool], list[Demand]]:
    """Pools of GPUs, and services that fit into them."""
    pools = {}
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)):
        hosts = tuple(draw(st.lists(st.sampled_from(("h1", "h2", "h3")), unique=True)))
        pools[name] = DevicePool(name, GPUS[: draw(st.integers(1, 8))], hosts)
    demands = []
    for number in range(draw(st.integers(0, 6))):
        pool = draw(st.sampled_from(sorted(pools)))
        demands.append(Demand(f"s{number}", pool, draw(st.integers(1, len(pools[pool].places)))))
    return pools, demands


@given(problems())
def test_no_two_workers_of_a_service_share_a_gpu_and_loads_are_even(
    problem: tuple[dict[str, DevicePool], list[Demand]],
) -> None:
    pools, demands = problem
    found = assign(pools, demands)
    assert found == assign(pools, demands)
    loads = {name: Counter(dict.fromkeys(pool.places, 0)) for name, pool in pools.items()}
    for demand in demands:
        places = [place for workers in found[demand.service] for place in workers]
        assert len(set(places)) == len(places)
        assert set(places) == set(pools[demand.pool].places), "those for later workers follow"
        loads[demand.pool].update(place for each in found[demand.service][: demand.workers] for place in each)
    for counts in loads.values():
        assert max(counts.values()) - min(counts.values()) <= 1


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 8))
def test_several_gpus_of_a_worker_are_on_one_host(each: int, hosts: int, gpus: int) -> None:
    pool = DevicePool("p", GPUS[:gpus], tuple(f"h{number}" for number in range(hosts)))
    room = hosts * gpus if each == 1 else sum(gpus // each for _ in range(hosts))
    demand = Demand("s", "p", max(room, 1), each)
    if each > gpus:
        with pytest.raises(ConfigError):
            assign({"p": pool}, [demand])
        return
    workers = assign({"p": pool}, [demand])["s"]
    assert len(workers) == room
    assert all(len({place.host for place in worker}) == 1 for worker in workers)
    assert len({place for worker in workers for place in worker}) == room * each
    with pytest.raises(ConfigError, match="s"):
        assign({"p": pool}, [Demand("s", "p", room + 1, each)])


@pytest.mark.parametrize("layout", [Layout(shard=8, dp=2), Layout(tp=8, dp=2), Layout(shard=16), Layout(pp=2, tp=8)])
def test_consecutive_ranks_get_the_gpus_of_one_host(layout: Layout) -> None:
    pools = {"train": DevicePool("train", GPUS, ("n1", "n2"))}
    demands = [Demand("training", "train", 16, layout=layout), Demand("critic", "train", 8, layout=Layout(shard=8))]
    found = assign(pools, demands)
    assert found["training"] == [gpu(number, host) for host in ("n1", "n2") for number in range(8)]
    assert [(place,) for place in pools["train"].places] == found["training"]
    assert len({place.host for each in found["critic"][:8] for place in each}) == 1


def test_ranks_of_another_service_lie_on_the_host_with_less_work() -> None:
    pools = {"train": DevicePool("train", GPUS[:4], ("n1", "n2"))}
    demands = [Demand("training", "train", 4, layout=Layout(dp=4)), Demand("critic", "train", 2, layout=Layout(dp=2))]
    assert assign(pools, demands)["critic"][:2] == [gpu(0, "n2"), gpu(1, "n2")]


def test_ranks_on_cpus_take_each_host_for_its_share() -> None:
    demand = Demand("training", "farm", 5, layout=Layout(dp=5))
    workers = assign({"farm": DevicePool("farm", hosts=("a", "b"))}, [demand])["training"]
    assert [place.host for each in workers for place in each] == ["a", "a", "a", "b", "b"]


def test_ranks_that_have_no_room_are_refused() -> None:
    demand = Demand("training", "train", 9, layout=Layout(dp=9))
    with golden.raises(ConfigError, match="9 workers.*'train'"):
        assign({"train": DevicePool("train", GPUS[:4], ("n1", "n2"))}, [demand])


def test_services_of_one_pool_share_it_and_others_run_apart() -> None:
    pools = {name: DevicePool(name, devices) for name, devices in {"left": GPUS[:2], "right": GPUS[2:3]}.items()}
    demands = [Demand("training", "left", 1), Demand("generation", "left", 2), Demand("reward", "right", 1)]
    found = assign(pools, demands)
    assert found["training"][:1] == [gpu(0)]
    assert found["generation"] == [gpu(1), gpu(0)]
    assert found["reward"] == [gpu(2)]


def test_a_cpu_carries_any_number_of_workers() -> None:
    pool = DevicePool("farm", hosts=("a", "b"))
    workers = assign({"farm": pool}, [Demand("reward", "farm", 5)])["reward"]
    assert Counter(place.host for each in workers for place in each) == {"a": 3, "b": 2}


@pytest.mark.parametrize(
    ("demand", "says"),
    [
        (Demand("generation", "gpu", 1), "'gpu'"),
        (Demand("generation", "gpus", 3), "3 workers"),
        (Demand("generation", "gpus", 1, 3), "1 workers"),
    ],
)
def test_what_does_not_fit_is_refused_with_service_and_pool(demand: Demand, says: str) -> None:
    with golden.raises(ConfigError, match=re.escape(says)):
        assign({"gpus": DevicePool("gpus", GPUS[:2])}, [demand])


def test_a_host_knows_which_devices_it_lacks() -> None:
    assert Host("h", GPUS[:1]).lacks([CPU, *GPUS[:2]]) == [GPUS[1]]
