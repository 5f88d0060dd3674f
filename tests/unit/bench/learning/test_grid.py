"""The grid of `asyncrl-bench learning`: what is one run, what is asked for, which setting the claim is tested in."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.bench.learning import benchmark
from asyncrl.bench.learning.benchmark import left_to_run, read_filter, select_cases
from asyncrl.bench.learning.grid import Candidate, Case, Claim, Grid, Results, read_grid
from asyncrl.bench.learning.training_runs import config_values
from asyncrl.config.sections.algorithm_config import PRESETS
from asyncrl.config.sources import load
from asyncrl.experiments import experiments

GRID = read_grid((Path(benchmark.__file__).parent / "grid.toml").read_text())


def every_case(grid: Grid) -> list[Case]:
    return [case for cases in grid.possible_parts().values() for case in cases]


def test_a_row_is_run_at_every_limit_with_every_seed_and_pairs_turn_around(small_grid: Grid) -> None:
    (table,) = small_grid.tables
    seen = [(case.row, case.limit, case.seed) for case in table.cases()]
    assert seen == [
        ("grpo", 0, 0),
        ("grpo", 2, 0),
        ("rloo", 0, 0),
        ("rloo", 2, 0),
        ("grpo", 2, 1),
        ("grpo", 0, 1),
        ("rloo", 2, 1),
        ("rloo", 0, 1),
        ("learning rate 0", 2, 0),
    ]


def test_a_preset_that_stands_for_something_else_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("quickstart", "gspo", 2, 0, {"algorithm.preset": "gspo"})
    before = case.key({})
    monkeypatch.setitem(PRESETS, "gspo", PRESETS["grpo"])
    assert case.key({}) != before


def test_a_run_is_what_it_is_given_whatever_a_table_calls_it() -> None:
    case = Case("quickstart", "grpo", 2, 0, {})
    key = case.key({})
    assert Case("quickstart", "mask", 2, 0, {}).key({}) == key
    others = [
        Case("longer", "grpo", 2, 0, {}),
        Case("quickstart", "grpo", 1, 0, {}),
        Case("quickstart", "grpo", 2, 1, {}),
        Case("quickstart", "grpo", 2, 0, {"training.updates": 2}),
    ]
    assert len({key, case.key({"evaluate.samples": 4}), *(other.key({}) for other in others)}) == 6


def test_without_staleness_all_policies_are_one_run() -> None:
    policies: list[dict[str, Any]] = [{}, {"staleness.policy": "drop"}, {"staleness.policy": "block"}]
    keys = [{Case("stragglers", "", limit, 0, values).key({}) for values in policies} for limit in (0, 2)]
    assert [len(each) for each in keys] == [1, 3]


@pytest.mark.parametrize("task", sorted({task for table in GRID.tables for task in table.tasks}))
def test_tasks_leave_the_algorithm_to_the_row(task: str) -> None:
    settings = Case(task, "grpo", 2, 0, {}).settings({})
    assert not [key for key in settings if key.startswith("algorithm.")]
    assert settings["training.learning_rate"] == load(task, environ={}).config.training.learning_rate


def test_every_case_of_the_grid_is_a_config_that_can_run() -> None:
    for values in {str(case.values): case for case in every_case(GRID)}.values():
        config = load(None, (), {}, config_values(values, GRID.defaults, Path("model"))).config
        assert config.staleness.limit == values.limit
        assert config.evaluate.every == config.steps


def test_every_task_has_an_experiment_an_expected_time_and_an_evaluation() -> None:
    for task in {case.task for case in every_case(GRID)}:
        assert task in experiments()
        assert GRID.expected_seconds[task] > 0
        assert load(task, environ={}).config.evaluate.prompts


def test_every_preset_is_in_the_grid() -> None:
    (presets,) = [table for table in GRID.tables if table.name == "presets"]
    assert set(PRESETS) == set(presets.rows)


def test_controls_are_in_every_table_for_each_of_its_tasks() -> None:
    for table in GRID.tables:
        controls = {(case.task, case.row) for case in table.controls.cases()} if table.controls else set()
        assert controls <= {(case.task, case.row) for case in table.cases()}
        rows = ("answers withheld",) if table.name == "episodes" else ("learning rate 0", "shuffled advantages")
        assert controls == {(task, row) for task in table.tasks for row in rows}


def test_what_rows_are_compared_with_is_run_for_every_pair() -> None:
    for table in GRID.tables:
        there = {case.key(GRID.defaults) for case in table.cases()}
        wanted = [table.synchronous_of(case) for case in table.cases() if case.row in table.rows]
        assert {case.key(GRID.defaults) for case in wanted} <= there


def test_a_base_is_in_all_rows_and_controls_and_is_what_they_are_compared_with() -> None:
    (table,) = [table for table in GRID.tables if table.name == "ppo-policies"]
    assert {case.values["algorithm.preset"] for case in table.cases()} == {"ppo"}
    case = Case("quickstart", "drop", 8, 3, table.rows["drop"])
    assert table.synchronous_of(case) == Case("quickstart", "drop", 0, 3, {"algorithm.preset": "ppo"})


def test_a_mapping_among_the_defaults_is_of_the_task_of_that_name() -> None:
    defaults = {"evaluate.samples": 4, "longer": {"steps": 60, "evaluate.samples": 2}}
    told = [Case(task, "grpo", 2, 0, {}).settings(defaults) for task in ("longer", "shorter")]
    assert [(each["steps"], each["evaluate.samples"]) for each in told] == [(60, 2), (100, 4)]
    assert "longer" not in told[1]


def test_filters_let_through_what_they_name(small_grid: Grid) -> None:
    parts = small_grid.parts({})
    wanted = read_filter(["task=quickstart,longer", "limit=0", "table=defaults", "row=grpo,rloo"])
    found = select_cases(parts, wanted)
    assert [(case.row, case.limit) for case in found["defaults"]] == [("grpo", 0), ("rloo", 0)] * 2
    assert set(found) == {"defaults"}
    assert select_cases(parts, read_filter(["seed=7"])) == {}
    assert select_cases(parts, read_filter([])) == parts


@pytest.mark.parametrize("row", sorted({case.row for case in every_case(GRID)}))
def test_each_row_can_be_asked_for_by_its_name(row: str) -> None:
    assert read_filter([f"row={row},grpo"]) == {"row": {row, "grpo"}}


@pytest.mark.parametrize("written", ["tasks=quickstart", "task", "task="])
def test_a_filter_that_is_none_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="write one of table, task, row, limit, seed"):
        read_filter([written])


def test_what_has_a_result_is_not_run_again_and_nothing_is_run_twice(small_grid: Grid) -> None:
    cases = [Case("quickstart", row, limit, 0, {}) for row in ("grpo", "mask") for limit in (0, 2)]
    results = {cases[0].key(small_grid.defaults): {"held_out": 0.9}}
    left = left_to_run(small_grid, {"table": cases}, results, again=False)
    assert [(case.row, case.limit) for case in left.values()] == [("grpo", 2)]


# ---- the setting of the claim ----------------------------------------------------------------------------


def results_of_search(grid: Grid, by_candidate: dict[str, tuple[float | None, float]]) -> Results:
    """Results by key: what each candidate gets when synchronous, and at the large limit; None for a failed run."""

    def line(reward: float | None) -> dict[str, Any]:
        return {"failed": "it died"} if reward is None else {"held_out": reward}

    return {
        case.key(grid.defaults): line(by_candidate[candidate.name][case.limit != 0])
        for candidate in grid.claim.candidates
        for case in grid.claim.uncorrected_cases(candidate, grid.claim.search_seeds)
    }


GENTLE = "quickstart, as it is"
ROUGH = "quickstart, learning_rate 0.001"


def test_the_setting_is_the_first_that_loses_enough_without_a_correction(small_grid: Grid) -> None:
    found = results_of_search(small_grid, {GENTLE: (1.0, 0.95), ROUGH: (0.95, 0.7)})
    chosen = small_grid.claim.chosen(found)
    assert chosen is not None
    assert chosen.name == ROUGH
    proof = small_grid.parts(found)["claim"]
    assert {case.seed for case in proof} == {0, 1}
    assert {case.seed for case in small_grid.claim.search()} == {100, 101}
    assert {(case.row.removeprefix(f"{ROUGH}, "), case.limit) for case in proof} == {
        ("uncorrected", 0),
        ("uncorrected", 8),
        ("default correction", 8),
    }


def test_no_corrected_run_can_choose_the_setting(small_grid: Grid) -> None:
    claim = small_grid.claim
    defaults = small_grid.defaults
    found = results_of_search(small_grid, {GENTLE: (1.0, 0.95), ROUGH: (0.95, 0.7)})
    corrected = {case.key(defaults): {"held_out": 0.0} for each in claim.candidates for case in claim.proof(each)}
    assert not corrected.keys() & found.keys()
    assert claim.chosen({**found, **corrected}) == claim.chosen(found)


def test_nothing_is_chosen_before_the_search_is_complete_or_when_none_qualifies(small_grid: Grid) -> None:
    found = results_of_search(small_grid, {GENTLE: (1.0, 0.95), ROUGH: (0.95, 0.7)})
    assert small_grid.claim.chosen(dict(list(found.items())[:-1])) is None
    gentle = results_of_search(small_grid, {GENTLE: (1.0, 0.95), ROUGH: (1.0, 0.92)})
    assert small_grid.claim.chosen(gentle) is None
    assert "claim" not in small_grid.parts(gentle)


def test_a_candidate_whose_synchronous_runs_failed_is_not_chosen(small_grid: Grid) -> None:
    found = results_of_search(small_grid, {GENTLE: (None, 0.0), ROUGH: (0.95, 0.7)})
    chosen = small_grid.claim.chosen(found)
    assert chosen is not None
    assert chosen.name == ROUGH


def claim_of(*candidates: tuple[str, float, float]) -> tuple[Claim, Results]:
    """Returns a claim whose candidates have these names and got these rewards, synchronous and stale."""
    made = tuple(Candidate("quickstart", {name: number}) for number, (name, _, _) in enumerate(candidates))
    claim = Claim(8, 0.1, 0.8, (100, 101), (0, 1), {"algorithm.old_logprobs": "recomputed"}, made, {})
    results = {
        case.key({}): {"held_out": rewards[case.limit != 0]}
        for candidate, (_, *rewards) in zip(made, candidates, strict=True)
        for case in claim.uncorrected_cases(candidate, claim.search_seeds)
    }
    return claim, results


def name_of_chosen(*candidates: tuple[str, float, float]) -> str | None:
    claim, results = claim_of(*candidates)
    chosen = claim.chosen(results)
    return None if chosen is None else next(iter(chosen.values))


def test_the_first_candidate_that_learns_and_loses_is_chosen() -> None:
    gentle = ("gentle", 1.0, 0.95)
    rough = ("rough", 0.95, 0.8)
    rougher = ("all", 0.9, 0.2)
    assert name_of_chosen(gentle, rough, rougher) == "rough"
    assert name_of_chosen(rougher, rough, gentle) == "all"


def test_no_setting_is_chosen_where_none_loses_or_the_synchronous_run_does_not_learn() -> None:
    assert name_of_chosen(("gentle", 1.0, 0.95)) is None
    assert name_of_chosen(("never learns", 0.5, 0.1)) is None
    claim, results = claim_of(("other seeds", 1.0, 0.0))
    keys = {(case.limit, case.seed): case.key({}) for case in claim.search()}
    failed: dict[str, dict[str, Any]] = {keys[0, 100]: {"failed": ""}, keys[8, 101]: {"failed": ""}}
    assert claim.chosen({**results, **failed}) is None
    assert claim.chosen({key: {"failed": ""} for key in results}) is None
