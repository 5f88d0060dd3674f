"""kill -9 after a checkpoint: the resumed run trains the samples that waited for training, and samples none again."""

import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from torchless_runs import Run  # noqa: E402

from asyncrl.controller.journal.journal import Scan  # noqa: E402
from asyncrl.controller.journal.ledger import (  # noqa: E402
    AttemptStarted,
    Dropped,
    Generated,
    Record,
    Restored,
    Resumed,
    Trained,
)
from asyncrl.controller.journal.run_storage import FileStore  # noqa: E402

pytestmark = [pytest.mark.fleet, pytest.mark.kills, pytest.mark.usefixtures("programs")]

FAR_AHEAD = ("--staleness.limit", "4", "--staleness.admission", "full", "--training.checkpoint_every", "1")
KILLED_AT = ("controller", "hinted", 5)
Key = tuple[int, int]


def after_the_resume(run: Run) -> list[Record]:
    with closing(FileStore(run.directory, writable=False)) as store:
        records = [framed.record for framed in Scan(store).surviving()]
    last = max(number for number, record in enumerate(records) if isinstance(record, Resumed))
    return records[last + 1 :]


def keys(cuts: tuple[tuple[int, tuple[int, ...]], ...]) -> set[Key]:
    return {(group, member) for group, members in cuts for member in members}


def sampled_again(records: list[Record]) -> set[Key]:
    again: set[Key] = set()
    for record in records:
        match record:
            case Generated(group=group, samples=samples):
                again |= {(group, member) for member, *_ in samples}
            case AttemptStarted(group=group, members=members):
                again |= keys(((group, members),))
    return again


def test_samples_that_waited_for_training_outlive_a_kill(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", (*FAR_AHEAD, "--steps", "12"))
    assert run.to_its_end(KILLED_AT) == -9, run.shown
    manifest = json.loads((run.directory / "checkpoints" / "5" / "manifest.json").read_text())
    saved = keys(tuple((group, tuple(members)) for group, members in manifest["ready"]))
    assert len(saved) >= 12, "a step trains twelve, and four steps' samples were admitted ahead"

    assert run.to_its_end() == 0, run.shown
    run.audited()
    run.leaves_nothing()
    restored, *records = after_the_resume(run)
    assert isinstance(restored, Restored)
    assert keys(restored.groups) == saved
    assert not saved & sampled_again(records)
    trained = {key for record in records if isinstance(record, Trained) for key in keys(record.cuts)}
    stale = {key for r in records if isinstance(r, Dropped) for key in keys(((r.group, r.members),))}
    assert saved <= trained | stale
    assert len(saved & trained) >= 12
    assert f"of the samples in flight {len(saved)} wait for training as they are" in run.shown


def test_after_accepted_changes_everything_is_sampled_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", (*FAR_AHEAD, "--steps", "8"))
    assert run.to_its_end(KILLED_AT) == -9, run.shown
    run.flags = (*run.flags, "--training.learning_rate", "0.5", "--accept-changes")
    assert run.to_its_end() == 0, run.shown
    run.audited()
    assert not any(isinstance(record, Restored) for record in after_the_resume(run))
    assert "of the samples in flight 0 wait for training as they are" in run.shown
