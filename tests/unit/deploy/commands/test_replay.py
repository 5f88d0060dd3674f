"""asyncrl replay: where answers differ, the smallest batch, and mistakes in its arguments."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.deploy.commands.replayed_service import (
    Condition,
    KeptRows,
    RecordedWorker,
    differences,
    smallest,
    steps_from,
)
from asyncrl.engines.training.training_step import StepOutcome
from asyncrl.errors import ConfigError
from asyncrl.lanes.data.recorder import RecordFiles, read_records
from asyncrl.protocols.batch import Batch, BatchRef, Column, Cuts, RowRef
from asyncrl.protocols.messages import Score

ROW = RowRef(1, 0, 0, 0, 3, 2, 0, 0, "stop", ())


@pytest.mark.parametrize(
    ("recorded", "found", "expected"),
    [
        (1.0, 1.0, []),
        (float("nan"), float("nan"), []),
        ({"loss": 1.0, "kl": 2.0}, {"loss": 1.0, "kl": 2.5}, [("kl", 2.0, 2.5)]),
        ([1, [2, 3]], [1, [2, 4]], [("1.1", 3, 4)]),
        ({"a": 1}, {"a": 1, "b": 2}, [("", "1 parts", "2 parts")]),
        (Score(1.0, {}), Score(0.5, {}), [("reward", 1.0, 0.5)]),
        (ROW, ROW._replace(places=(1,)), []),
        (np.float32([1, 2]), np.float32([1, 2]), []),
        ("stop", "length", [("", "stop", "length")]),
    ],
)
def test_differences_have_their_place(recorded: Any, found: Any, expected: list[Any]) -> None:
    assert list(differences(recorded, found)) == expected


def test_arrays_differ_by_bits_shape_and_type() -> None:
    one = np.float32([1, 2])
    for other in (np.float32([1, 3]), np.float32([[1, 2]]), np.float64([1, 2]), -np.float32([-1, -2 - 1e-6])):
        assert len(list(differences({"a": one}, {"a": other}))) == 1


@given(st.sets(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 31))
def test_the_smallest_set_is_what_is_needed(needed: set[int], count: int) -> None:
    groups = sorted(needed | set(range(count)))
    assert sorted(smallest(groups, lambda some: needed <= set(some))) == sorted(needed)


@given(st.lists(st.integers(-5, 9), min_size=1, max_size=20), st.integers(0, 30))
def test_none_can_be_left_out_of_the_smallest_set(weights: list[int], bound: int) -> None:
    def shows(some: Sequence[int]) -> bool:
        return sum(weights[each] for each in some) > bound

    groups = range(len(weights))
    if shows(groups):
        found = smallest(groups, shows)
        assert shows(found)
        assert len(found) == 1 or not any(shows([each for each in found if each != left]) for left in found)


def test_conditions_are_skipped_steps_or_bounds_of_metrics() -> None:
    outcome = StepOutcome(1, "", (), (), {"grad_norm": 2.0})
    assert Condition("grad_norm > 1.5").holds(outcome)
    assert not Condition("grad_norm<=1.5e0").holds(outcome)
    assert not Condition().holds(outcome)
    assert Condition().holds(StepOutcome(0, "not finite", (), (), {}))
    with pytest.raises(ConfigError, match="no metric 'loss'; it has grad_norm"):
        Condition("loss > 1").holds(outcome)
    with pytest.raises(ConfigError, match="neither 'skipped' nor METRIC > NUMBER"):
        Condition("grad_norm")


def test_steps_that_are_not_recorded_are_refused() -> None:
    assert steps_from((None, None), [3, 4, 5]) == (3, 5)
    assert steps_from((5, 6), [3, 4, 5]) == (4, 5)
    with pytest.raises(ConfigError, match="--from: steps 4 to 6 are recorded, not 3"):
        steps_from((3, None), [3, 4, 5])
    with pytest.raises(ConfigError, match="--to: steps 4 to 6 are recorded, not 7"):
        steps_from((None, 7), [3, 4, 5])


def test_values_of_another_moment_are_counted_and_not_compared() -> None:
    kept = KeptRows()
    for number, (valued_at, value) in enumerate([(7, 0.5), (8, 0.5), (8, 0.25)]):
        kept.kept((1, number, 0), {"values": np.float32([value]), "valued_at": np.array([valued_at])})
        row = {"values": np.float32([0.5]), "valued_at": np.array([8])}
        kept.recorded[1, number, 0].append(Batch({name: Column.of([values]) for name, values in row.items()}))
    assert [place for place, _, _ in kept.differences()] == ["row 1.2.0.values"]
    assert kept.unordered == 1


def test_the_first_step_after_forgotten_records_is_not_replayed(tmp_path: Path) -> None:
    """The rows of its batch may have been read before."""

    async def write(most_bytes: int, instance: str) -> list[int]:
        with closing(RecordFiles(tmp_path / "recorded", instance, most_bytes, ("worker", "{}"))) as files:
            for version in range(40):
                cuts = Cuts(0, version, BatchRef((ROW,)), 3, 1)
                files.append(("call", version, "step", [cuts]))
                files.append(("answer", version, None, {}))
        spec: Any = SimpleNamespace(instance=instance, service="training")
        return RecordedWorker(tmp_path, spec).versions

    assert asyncio.run(write(1 << 20, "training0.0-0-a")) == list(range(40))
    kept = asyncio.run(write(1_500, "training1.0-0-b"))
    recorded = [
        record[3][0].version for record in read_records(tmp_path / "recorded", "training1.0-0-b") if record[0] == "call"
    ]
    assert recorded[0] > 0
    assert kept == recorded[1:]


async def test_a_replay_begins_where_the_rows_of_its_first_batch_were_prefetched(tmp_path: Path) -> None:
    """The rows of the second step came before the first one was called: its reads are given, and it is not trained."""
    batches = [BatchRef((ROW._replace(group=group),)) for group in range(3)]
    with closing(RecordFiles(tmp_path / "recorded", "training0.0-0-aa", 10**6, ("worker", "{}"))) as files:
        for number, rows in enumerate(batches[:2]):
            files.append(("call", number, "prefetch", [rows]))
            files.append(("answer", number, [True], {}))
        for version, rows in enumerate(batches):
            files.append(("call", 10 + version, "step", [Cuts(0, version, rows, 3, 1)]))
            files.append(("answer", 10 + version, None, {}))
    spec: Any = SimpleNamespace(instance="training0.0-0-aa", service="training")
    calls = [record[1] for record in RecordedWorker(tmp_path, spec).records_from(1) if record[0] == "call"]
    assert calls == [1, 11, 12]
