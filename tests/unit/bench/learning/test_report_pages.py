"""docs/learning.md and the full tables from results: controls, verdicts, plots, and what is missing."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from asyncrl.bench.learning import benchmark
from asyncrl.bench.learning.grid import Case, Grid, read_grid
from asyncrl.bench.learning.report_pages import (
    Chart,
    Point,
    cells,
    columns,
    no_worse,
    page,
    ranking,
    recovery,
    ticks_to,
    write_pages,
)

Lines = dict[str, dict[str, Any]]


def line(case: Case, held_out: float, **more: Any) -> dict[str, Any]:
    """As `learning.jsonl` has it."""
    told = {"task": case.task, "limit": case.limit, "seed": case.seed, "wire": "ipc", "values": dict(case.values)}
    found = {
        "date": "2026-01-02",
        "revision": "abc",
        "took": 40.0,
        "held_out_before": 0.2,
        "held_out": held_out,
        "seconds_to_goal": 10.0,
        "steps_to_goal": 40,
        "staleness_mean": 1.5,
        "trained_by_decile": [1.0] * 9 + [0.5],
        "curve": [(1, 1.0, 0.2), (50, 25.0, held_out)],
        "others": 0.0,
    }
    return {**told, **found, **more}


def results_of(grid: Grid, rewards: Mapping[tuple[str, int, int], float], **more: Any) -> Lines:
    """rewards: by row, limit and seed, of the grid's one table."""
    (table,) = grid.tables
    return {
        case.key(grid.defaults): line(case, rewards[place], **more)
        for case in table.cases()
        if (place := (case.row, case.limit, case.seed)) in rewards
    }


def test_a_cell_compares_with_the_synchronous_run_of_its_seed_and_row(small_grid: Grid) -> None:
    rewards = {("grpo", 0, 0): 0.9, ("grpo", 0, 1): 0.8, ("grpo", 2, 0): 0.85, ("grpo", 2, 1): 0.83}
    results = results_of(small_grid, {**rewards, ("rloo", 2, 0): 0.5, ("learning rate 0", 2, 0): 0.2})
    synchronous, stale, alone, control = cells(small_grid, small_grid.tables[0], "quickstart", results)
    assert stale.losses == [pytest.approx(0.05), pytest.approx(-0.03)]
    assert (synchronous.row, synchronous.limit, columns(synchronous)[4]) == ("grpo", 0, "")
    assert columns(stale)[:5] == ("grpo", "2", "2", "0.840 ± 0.014", "+0.010 (< +0.263)")
    assert columns(alone)[:5] == ("rloo", "2", "1", "0.500", "")
    assert columns(control)[:5] == ("learning rate 0", "2", "1", "0.200", "+0.700")


def test_the_goal_is_told_with_who_reached_it_and_on_which_machine(small_grid: Grid) -> None:
    (table,) = small_grid.tables
    both = results_of(small_grid, {("grpo", 0, 0): 0.9, ("grpo", 0, 1): 0.9})
    first, second = both.values()
    never = {"seconds_to_goal": None, "steps_to_goal": None}

    def told(*pair: dict[str, Any]) -> tuple[str, ...]:
        (cell,) = cells(small_grid, table, "quickstart", dict(zip(both, pair, strict=True)))
        return columns(cell)[5:7]

    assert told(first, {**second, "seconds_to_goal": 13.0, "steps_to_goal": 50}) == ("45", "11.5")
    assert told(first, {**second, **never}) == ("never (1 of 2)", "never (1 of 2)")
    assert told({**first, **never}, {**second, **never}) == ("never", "never")
    assert told(first, {**second, "others": 0.2}) == ("40", "10.0*")
    assert told(first, {**second, "others": None}) == ("40", "10.0*")


PAIRS = {("grpo", limit, seed): 0.9 for limit in (0, 2) for seed in (0, 1)}


def test_the_time_to_the_goal_is_compared_pair_by_pair(small_grid: Grid) -> None:
    def told(seconds: Mapping[tuple[int, int], float | None], **more: Any) -> str:
        results = results_of(small_grid, PAIRS).items()
        timed = {key: (line, (line["limit"], line["seed"])) for key, line in results}
        changed = {
            key: {**line, "seconds_to_goal": seconds[place], **(more if place == (2, 1) else {})}
            for key, (line, place) in timed.items()
            if place in seconds
        }
        synchronous, stale = cells(small_grid, small_grid.tables[0], "quickstart", changed)
        assert columns(synchronous)[7] == ""
        return columns(stale)[7]

    first: dict[tuple[int, int], float | None] = {(0, 0): 10.0, (2, 0): 8.0}
    assert told({**first, (0, 1): 20.0, (2, 1): 10.0}) == "0.50 to 0.80"
    assert told({**first, (0, 1): 20.0, (2, 1): 10.0}, revision="def") == "0.50 to 0.80*"
    assert told({**first, (0, 1): 20.0, (2, 1): None}) == "0.80 to 0.80 (1 of 2)"
    assert told({**first, (0, 1): None, (2, 1): 10.0}) == "0.80 to 0.80 (1 of 2)"
    assert told({**first, (2, 1): 10.0}) == "0.80 to 0.80"
    assert told({(0, 0): None, (2, 0): 8.0}) == ""


def test_wall_clock_of_a_fleet_in_one_process_is_not_shown(small_grid: Grid) -> None:
    (table,) = small_grid.tables
    for cell in cells(small_grid, table, "quickstart", results_of(small_grid, PAIRS, wire="inproc")):
        assert columns(cell)[5:8] == ("40", "", "")


def test_what_a_correction_leaves_out_is_told_by_runs_that_measured_it(small_grid: Grid) -> None:
    (table,) = small_grid.tables
    both = results_of(small_grid, {("grpo", 0, 0): 0.9, ("grpo", 0, 1): 0.9})

    def shown(*values: dict[str, Any]) -> str:
        lines = dict(zip(both, ({**line, **own} for line, own in zip(both.values(), values, strict=True)), strict=True))
        return columns(cells(small_grid, table, "quickstart", lines)[0])[8]

    tenths = [0.5] * 10
    rejecting = {"values": {"algorithm.rejection": "token_k3"}}
    measured = {**rejecting, "rejected": 0.5, "trained_by_decile": tenths}
    assert shown({"trained_by_decile": tenths}, {"trained_by_decile": [1.0] * 10}) == " ".join(["75"] * 10)
    assert shown({**rejecting, "trained_by_decile": [1.0] * 10}, measured) == " ".join(["50"] * 10)
    assert shown(rejecting, {"values": {"algorithm.correction": "mask"}}) == ""


def test_held_out_costs_are_shown_where_there_are_any(small_grid: Grid) -> None:
    (table,) = small_grid.tables
    both = results_of(small_grid, {("grpo", 0, 0): 0.9, ("grpo", 0, 1): 0.9})
    costly = {key: {**line, "cost": cost} for (key, line), cost in zip(both.items(), (0.01, 0.03), strict=True)}
    shown = [columns(cells(small_grid, table, "quickstart", lines)[0])[3] for lines in (both, costly)]
    assert shown == ["0.900 ± 0.000", "0.900 ± 0.000, cost 0.020"]


def test_no_verdict_before_all_pairs_are_there(small_grid: Grid) -> None:
    (table,) = small_grid.tables

    def said(rewards: Mapping[tuple[str, int, int], float]) -> str:
        *_, stale = cells(small_grid, table, "quickstart", results_of(small_grid, rewards))
        return no_worse(stale, 2)

    one = {("grpo", 0, 0): 0.9, ("grpo", 2, 0): 0.9}
    assert said(one) == "not decided: 1 of 2 pairs"
    assert said({**one, ("grpo", 0, 1): 0.9, ("grpo", 2, 1): 0.899}).startswith("holds: mean loss +0.001")
    assert said({**one, ("grpo", 0, 1): 0.9, ("grpo", 2, 1): 0.8}).startswith("does not hold: mean loss +0.050")


@pytest.mark.parametrize(
    ("stale", "corrected", "says"),
    [
        (0.5, 0.8, "holds: of a loss of 0.400 the default correction recovers 75%"),
        (0.5, 0.6, "does not hold: of a loss of 0.400 the default correction recovers 25%"),
        (0.85, 0.9, "does not hold: with these seeds the uncorrected run loses +0.050 only"),
    ],
)
def test_recovery_is_told_of_the_seeds_of_the_proof(
    stale: float, corrected: float, says: str, small_grid: Grid
) -> None:
    claim = small_grid.claim
    candidate = claim.candidates[1]
    rewards = {("uncorrected", 0): 0.9, ("uncorrected", 8): stale, ("default correction", 8): corrected}
    results = {
        case.key(small_grid.defaults): line(case, rewards[case.row.removeprefix(f"{candidate.name}, "), case.limit])
        for case in claim.proof(candidate)
    }
    assert recovery(small_grid.claim, candidate, results).startswith(says)
    assert recovery(small_grid.claim, candidate, dict(list(results.items())[:-1])) == "is not decided: 1 of 2 seeds"


def test_rows_are_ranked_once_all_their_runs_are_there(small_grid: Grid) -> None:
    (table,) = small_grid.tables
    places = [(limit, seed) for limit in (0, 2) for seed in (0, 1)]
    rewards = {(row, *place): reward for row, reward in (("grpo", 0.8), ("rloo", 0.9)) for place in places}
    complete = results_of(small_grid, rewards)
    assert [(row, fmean(seen)) for row, seen in ranking(small_grid, table, complete)] == [("rloo", 0.9), ("grpo", 0.8)]
    del rewards["rloo", 2, 1]
    assert [row for row, _ in ranking(small_grid, table, results_of(small_grid, rewards))] == ["grpo"]
    told = page("tables_page.md.j2", small_grid, complete, [])
    assert "of the rows that are complete: rloo 0.900 (lowest run 0.900), grpo 0.800" in told


def test_the_page_says_what_was_not_run_and_what_failed(small_grid: Grid) -> None:
    results = results_of(small_grid, {("grpo", 0, 0): 0.9, ("grpo", 2, 0): 0.9})
    results["of another grid"] = line(Case("longer", "grpo", 2, 0, {}), 0.0)
    case = Case("quickstart", "rloo", 2, 0, {"algorithm.preset": "rloo"})
    told = {"task": "quickstart", "limit": 2, "seed": 0, "values": {"algorithm.preset": "rloo"}, "date": "2026-01-03"}
    results[case.key(small_grid.defaults)] = {**told, "failed": "Traceback\nFleetFailed: the trainer died"}
    text = page("summary_page.md.j2", small_grid, results, [])
    assert "3 of 17 runs, run 2026-01-02 to 2026-01-03." in text
    assert "| defaults | quickstart | 3 of 9 |" in text
    assert "| search | quickstart | 0 of 8 |" in text
    assert "The search is not complete" in text
    assert "limit 2, seed 0, {'algorithm.preset': 'rloo'}: FleetFailed: the trainer died" in text
    assert "| rloo |" not in text


def test_a_page_of_nothing_says_so(small_grid: Grid) -> None:
    text = page("summary_page.md.j2", small_grid, {}, [])
    assert "0 of 17 runs, none run yet." in text
    assert "- not run: quickstart" in text


def test_the_summary_shows_losses_below_the_limits_and_seconds_of_processes(small_grid: Grid) -> None:
    rewards = {("grpo", limit, seed): 0.9 - 0.1 * limit for limit in (0, 2) for seed in (0, 1)}
    in_one_process = results_of(small_grid, rewards, wire="inproc")
    text = page("summary_page.md.j2", small_grid, in_one_process, [])
    assert "| loss at η | 0, held out | 2 |" in text
    assert "| grpo | 0.900 | 0.200 |" in text
    text = page("summary_page.md.j2", small_grid, results_of(small_grid, rewards), [])
    assert "| seconds at η | 0 | 2 |" in text
    assert "| grpo | 10.0 | 10.0 |" in text


def test_the_committed_pages_are_what_the_committed_results_give(tmp_path: Path) -> None:
    bench = Path(benchmark.__file__).resolve().parents[1]
    grid = read_grid((bench / "learning/grid.toml").read_text())
    results = benchmark.read_results(bench / "results/learning.jsonl")
    docs = tmp_path / "docs"
    tables = tmp_path / "bench/results/learning.md"
    write_pages(grid, results, docs)
    assert (docs / "learning.md").read_text() == (bench.parent / "docs/learning.md").read_text()
    assert tables.read_text() == (bench / "results/learning.md").read_text()
    assert len((docs / "learning.md").read_text().split()) <= 1500


def test_what_was_written_can_be_read_and_every_plot_is_beside_the_full_tables(
    small_grid: Grid, tmp_path: Path
) -> None:
    only_grpo = read_grid(GRID_OF_ONE_ROW)
    rewards = {("grpo", limit, seed): 0.9 - 0.05 * limit for limit in (0, 2, 8) for seed in (0, 1)}
    paths = write_pages(only_grpo, results_of(only_grpo, rewards), tmp_path / "docs")
    names = sorted(path.stem for path in paths if path.suffix == ".svg")
    assert names == [f"defaults-quickstart-{what}" for what in ("curves", "deciles-2", "deciles-8", "reward")]
    summary, tables = ((tmp_path / name).read_text() for name in ("docs/learning.md", "bench/results/learning.md"))
    assert "[full tables](../bench/results/learning.md)" in summary
    assert summary.count("](learning/") == 2
    for name in names:
        assert f"](../../docs/learning/{name}.svg)" in tables
        drawn = ElementTree.fromstring((tmp_path / "docs/learning" / f"{name}.svg").read_text())
        assert drawn.findall("{http://www.w3.org/2000/svg}polyline")


GRID_OF_ONE_ROW = """
goal = 0.8
[defaults]
[expected_seconds]
quickstart = 40
[controls]
limits = [2]
seeds = [0]
rows = {}
[[tables]]
name = "defaults"
title = "Defaults"
tasks = ["quickstart"]
limits = [0, 2, 8]
seeds = [0, 1]
rows = { grpo = {} }
[claim]
limit = 8
least_loss = 0.1
least_reward = 0.8
search_seeds = [100]
seeds = [0, 1]
uncorrected = {}
candidates = []
"""


def test_points_lie_where_their_values_are() -> None:
    chart = Chart("a < b", "x", "y", [(0, "0"), (10, "10")], {"it": [Point(5, 0.5, (0.25, 1.0))]})
    drawn = ElementTree.fromstring(chart.svg())
    (circle,) = drawn.findall("{http://www.w3.org/2000/svg}circle")
    # Half way across the plot of 56 to 464, and half way up that of 316 to 34.
    assert (circle.get("cx"), circle.get("cy")) == ("260.0", "175.0")
    assert 'd="M260.0 245.5V34.0"' in chart.svg()


def test_ticks_hold_both_ends_between_them() -> None:
    assert ticks_to(25, 10) == [(0, "0"), (10, "10"), (20, "20"), (30, "30")]
    assert [value for value, _ in ticks_to(0, 5)] == [0, 5]


# ---- how long it takes -----------------------------------------------------------------------------------


def test_the_estimate_counts_each_run_once_and_takes_what_was_seen(small_grid: Grid) -> None:
    case = Case("quickstart", "grpo", 2, 1, {})
    assert benchmark.expected_seconds(small_grid, case, {}) == 40
    seen = results_of(small_grid, {("grpo", 0, 0): 0.9, ("grpo", 2, 0): 0.9}, took=72.0)
    assert benchmark.expected_seconds(small_grid, case, seen) == 72
    lines = benchmark.estimate(small_grid, small_grid.parts({}), seen).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["defaults", "9", "7", "0.1"],
        ["search", "8", "8", "0.2"],
        ["all,", "each", "once", "15", "0.3"],
    ]


def test_what_failed_is_run_again_only_when_asked(small_grid: Grid) -> None:
    parts = {"defaults": small_grid.tables[0].cases()}
    key = parts["defaults"][0].key(small_grid.defaults)
    failed = {key: {"failed": "it died"}}
    assert key not in dict(benchmark.left_to_run(small_grid, parts, failed, again=False))
    assert key in dict(benchmark.left_to_run(small_grid, parts, failed, again=True))
