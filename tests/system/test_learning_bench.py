"""One short run of the grid for true: model, training, evaluation, and nothing left behind but the model."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.bench.learning.grid import Case
from asyncrl.bench.learning.training_runs import POINTS, RunFailed, TrainingChild, run_case

pytestmark = [pytest.mark.fleet, pytest.mark.slow]
EVALUATION = {"evaluate.samples": 2, "evaluate.temperature": 1.0, "evaluate.size": 16}
DEFAULTS = {**EVALUATION, "telemetry.trace": False, "steps": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learning")


@pytest.fixture
def child(tmp_path: Path) -> Iterator[TrainingChild]:
    with closing(TrainingChild(tmp_path / "log.txt")) as child:
        yield child


def test_case_trains_with_its_settings(folder: Path, child: TrainingChild) -> None:
    outcome = run_case(Case("quickstart", "drop", 1, 3, {"staleness.policy": "drop"}), DEFAULTS, 0.01, folder, child)
    assert outcome["steps"] == 24
    assert outcome["staleness_max"] == 1
    assert outcome["steps_to_goal"] is not None
    assert 0 <= outcome["held_out_before"] < 0.6
    assert outcome["held_out_stderr"] > 0
    assert len(outcome["curve"]) == POINTS
    assert len(outcome["trained_by_decile"]) == 10
    assert all(0 < share <= 1 for share in outcome["trained_by_decile"])
    assert [path.name for path in folder.iterdir()] == ["models"]


def test_case_that_cannot_run_reports_the_reason(folder: Path, child: TrainingChild) -> None:
    with pytest.raises(RunFailed, match=r"training\.learning_rate"):
        run_case(Case("quickstart", "wrong", 1, 3, {"training.learning_rate": -1}), DEFAULTS, 0.8, folder, child)
    assert [path.name for path in folder.iterdir()] == ["models"]


def test_process_trains_cases_in_turn_and_is_replaced_after_a_failure(folder: Path, child: TrainingChild) -> None:
    case = Case("quickstart", "grpo", 1, 3, {"fleet.wire": "inproc", "steps": 6})
    assert run_case(case, DEFAULTS, 0.8, folder, child)["steps"] == 6
    with pytest.raises(RunFailed, match="did not end within 0 s"):
        child.train({"model": "nowhere"}, deadline=0.0)
    assert run_case(case, DEFAULTS, 0.8, folder, child)["steps"] == 6
