"""Transfers of weights: every way moves its bytes; the lines state goals, ratios and the bound of encryption."""

import pytest

from asyncrl.bench.transfer_speed import channels, shared_weights, weight_transfers
from asyncrl.bench.transfer_speed.channels import GOALS, Goal, goal_lines, result_lines
from asyncrl.bench.transfer_speed.shared_weights import Read, Reads, host_lines
from asyncrl.bench.transfer_speed.weight_transfers import SideTransfers, TimedTransfer, main, transfer_lines


def test_every_way_moves_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--megabytes", "4", "--rounds", "2"])
    printed = capsys.readouterr().out
    for side in weight_transfers.SIDES:
        assert f"\n  {side} " in printed
    assert printed.count("goal at least") == 4


def test_a_row_has_its_share_of_the_bare_socket_and_of_what_encryption_allows() -> None:
    taken = {
        weight_transfers.BARE: TimedTransfer(0.5, 0.1, 0.2),
        weight_transfers.CURVE: TimedTransfer(2.0, 0.7, 0.8),
        weight_transfers.DENSE: TimedTransfer(2.5, 1.0, 0.5),
        weight_transfers.SPARSE: TimedTransfer(0.6, 1.0, 0.5),
    }
    lines = list(transfer_lines({side: SideTransfers(10**9, (each, each)) for side, each in taken.items()}))
    dense = next(line for line in lines[0].splitlines() if "dense" in line)
    assert "0.2 [0.2 - 0.2]" in dense
    assert "0.8 [0.8 - 0.8]" in dense
    assert dense.endswith("1 + 0.5")
    assert lines[1:] == [
        "  MISSED  dense over the bare socket: 0.2, goal at least 0.7",
        "  MISSED  dense over what CURVE allows: 0.8, goal at least 0.9",
        "  met     CPU of what CURVE allows over dense: 1, goal at least 0.9",
        "  met     sparse over the bare socket: 0.833, goal at least 0.7",
        "  Encryption leaves 0.25 of the bare socket, whatever is around it.",
    ]


def test_a_flip_has_its_cpu_time_beside_its_wall_clock() -> None:
    taken = {
        shared_weights.LIMIT: Read(0.1, 0.1),
        shared_weights.FLIP: Read(0.02, 0.001, 65, 0.0003, 0.0006),
        shared_weights.COPY: Read(0.11, 0.1),
        shared_weights.BUCKETS: Read(0.5, 0.1),
    }
    lines = list(host_lines({side: Reads([each, each]) for side, each in taken.items()}))
    assert (
        lines[1].strip() == "a flip: 1 ms of CPU, 65 page faults; repeated, its digest takes 0.3 and its views 0.6 ms"
    )
    assert [line.split(":")[0].split(maxsplit=1) for line in lines[2:]] == [
        ["MISSED", "flip, ms of wall clock"],
        ["met", "flip, ms of CPU"],
        ["met", "copies over two memcpys"],
        ["MISSED", "buckets over copies"],
        ["met", "buckets over the flip"],
    ]


# Goals of `asyncrl-bench channels`: ratios within a round, bounds on either side, systems that do not run.
def goal(at_most: bool, bound: float) -> Goal:
    return Goal("G", "a over b", bound, ("a", "x"), ("b", "x"), at_most)


@pytest.mark.parametrize(("ratio", "at_most", "met"), [(3.0, False, True), (2.9, False, False), (3.1, True, False)])
def test_a_goal_bounds_from_below_or_above(
    ratio: float, at_most: bool, met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "GOALS", [goal(at_most, 3.0)])
    (line,) = goal_lines([{"a": {"x": ratio}, "b": {"x": 1.0}}])
    assert ("MISSED" in line) is not met


def test_ratios_pair_the_values_of_one_round() -> None:
    rounds = [{"a": {"x": 4.0}, "b": {"x": 2.0}}, {"a": {"x": 90.0}, "b": {"x": 30.0}}, {"a": {"x": 5.0}}]
    assert goal(False, 1.0).ratios(rounds) == [2.0, 3.0]


def test_a_goal_can_bound_a_value_itself() -> None:
    assert Goal("G", "a", 1.0, ("a", "x"), None, True).ratios([{"a": {"x": 4.0}}, {"b": {"x": 1.0}}]) == [4.0]


def test_goals_beside_a_system_that_does_not_run_are_not_measured() -> None:
    lines = list(goal_lines([{"asyncrl": {"rtt_p50_us": 150.0}, "limits": {"rtt_p50_us": 40.0}}]))
    assert len(lines) == len(GOALS)
    assert "MISSED" in lines[0]
    assert all("not measured" in line for line in lines[1:])


def test_the_table_shows_medians_and_ranges() -> None:
    lines = list(result_lines([{"a": {"x": 1.0}}, {"a": {"x": 5.0}}, {"a": {"x": 3.0}}]))
    assert lines[0] == "a:"
    assert lines[1].split() == ["x", "3", "[1", "-", "5]"]
