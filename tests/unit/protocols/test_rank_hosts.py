"""Consecutive ranks lie on one host, and a group of ranks crosses hosts only where no host has room for it."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.protocols.rank_layout import Axis, Layout, crossings, hosts_of_ranks

SMALL = st.integers(1, 3)


@st.composite
def rooms(draw: st.DrawFn) -> tuple[Layout, dict[str, int]]:
    """A layout, and hosts with room for its ranks, or more."""
    layout = Layout(draw(SMALL), draw(SMALL), draw(SMALL), shard=draw(SMALL), sp=draw(st.integers(1, 2)))
    room = {f"h{number}": draw(st.integers(0, 8)) for number in range(draw(st.integers(1, 5)))}
    room["last"] = max(0, layout.size - sum(room.values())) + draw(st.integers(0, 3))
    return layout, room


@given(rooms())
def test_every_rank_has_a_place_and_no_host_more_than_it_takes(problem: tuple[Layout, dict[str, int]]) -> None:
    layout, room = problem
    hosts = hosts_of_ranks(layout, room, {})
    assert len(hosts) == layout.size
    assert all(count <= room[host] for host, count in Counter(hosts).items())


@given(rooms(), st.data())
def test_ranks_that_run_stay_where_they_are(problem: tuple[Layout, dict[str, int]], data: st.DataObject) -> None:
    layout, room = problem
    together = hosts_of_ranks(layout, room, {})
    placed = {rank: together[rank] for rank in data.draw(st.sets(st.integers(0, layout.size - 1)))}
    left = Counter(room) - Counter(placed.values())
    hosts = hosts_of_ranks(layout, left, placed)
    assert all(hosts[rank] == host for rank, host in placed.items())
    assert all(count <= room[host] for host, count in Counter(hosts).items())


@pytest.mark.parametrize(
    ("layout", "room", "whole"),
    [
        (Layout(shard=8, dp=2), {"n1": 8, "n2": 8}, "shards"),
        (Layout(tp=8, dp=2), {"n1": 8, "n2": 8}, "tensor"),
        (Layout(tp=4, dp=4), {"n1": 6, "n2": 6, "n3": 6, "n4": 6}, "tensor"),
        (Layout(shard=8, dp=2), {"n1": 3, "n2": 9, "n3": 8}, "shards"),
        (Layout(sp=4, dp=3), {"n1": 5, "n2": 7, "n3": 4}, "sequence"),
        (Layout(ep=4, dp=2), {"n1": 7, "n2": 7}, "experts"),
        (Layout(pp=2, tp=4, dp=2), {"n1": 4, "n2": 8, "n3": 4}, "tensor"),
        (Layout(tp=2, shard=4), {"n1": 4, "n2": 4}, "tensor"),
    ],
)
def test_groups_stay_on_one_host_where_hosts_have_room_for_them(
    layout: Layout, room: dict[str, int], whole: Axis
) -> None:
    hosts = hosts_of_ranks(layout, room, {})
    assert all(len({hosts[rank] for rank in ranks}) == 1 for ranks in layout.groups(whole))


def test_a_larger_host_takes_all_ranks() -> None:
    assert set(hosts_of_ranks(Layout(dp=8), {"n1": 4, "n2": 8}, {})) == {"n2"}


def test_the_ranks_of_one_copy_follow_each_other_on_the_hosts_that_it_needs() -> None:
    hosts = hosts_of_ranks(Layout(shard=16), {"n1": 8, "n2": 8}, {})
    assert sum(one != other for one, other in pairwise(hosts)) == 1


def test_a_rank_that_starts_again_comes_beside_its_neighbours() -> None:
    placed = {rank: f"n{1 + rank // 8}" for rank in range(16) if rank != 9}
    assert hosts_of_ranks(Layout(shard=8, dp=2), {"n3": 1, "n2": 1}, placed)[9] == "n2"
    assert hosts_of_ranks(Layout(shard=8, dp=2), {"n3": 1}, placed)[9] == "n3"


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (
            Layout(shard=16),
            "training.layout.shard = 16: its group of ranks crosses hosts (ranks 0 to 7 on n1, ranks 8 to 15 on n2), "
            "so the weights of every layer, which are gathered for each pass, cross the network",
        ),
        (
            Layout(shard=8, dp=2),
            "training.layout.dp = 2: 8 of 8 groups of ranks cross hosts (the first one: rank 0 on n1, rank 8 on n2), "
            "so the sums of gradients, once in a step, cross the network",
        ),
        (Layout(tp=16), "training.layout.tp = 16: its group"),
        (Layout(sp=16), "training.layout.sp = 16: its group"),
        (Layout(ep=16), "training.layout.ep = 16: its group"),
        (Layout(pp=2, tp=8), "training.layout.pp = 2: 8 of 8 groups"),
    ],
)
def test_a_group_that_crosses_is_named_with_what_crosses(layout: Layout, says: str) -> None:
    said = list(crossings("training", layout, ["n1"] * 8 + ["n2"] * 8))
    assert said[0].startswith(says)
    assert len(said) == 1
    assert not list(crossings("training", layout, ["n1"] * 16))
