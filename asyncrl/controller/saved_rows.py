"""The rows of READY samples outlive a checkpoint: it saves them, and a run that resumes there trains them.

    commit ──> Training.save_rows: a file of the checkpoint; the manifest lists the samples; the terms of their scores
    resume ──> record `Restored` ──> Gate.restore ──> Generation.restore_rows ──> the samples have rows again

Only what the checkpoint itself has is restored, so no sample of steps that a resume does again comes back. A sample
keeps its versions, and the gate drops it when it is too old, as ever.
"""

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from asyncrl.controller.observers.events import Warned
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.errors import ArenaFull, DeadlineExceeded, RemoteError, Retryable, WireError
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import Checkpointed
from asyncrl.protocols.service_contracts import Generation, Training

READY_TERMS = "ready-terms.json"
"""The file of a checkpoint with the terms of the scores of READY samples, which metrics and shown samples name."""

Terms = Mapping[tuple[int, int], Mapping[str, float]]
"""Terms of scores by (group, member)."""


async def save_rows(training: Training, ready: BatchRef, directory: str) -> Checkpointed:
    """Lets the trainer write the rows of these samples into the folder of a checkpoint."""
    return await training.save_rows(directory, ready) if len(ready) else Checkpointed(0, "", {})


async def restore_rows(generation: Generation, tracker: SampleTracker, directory: str) -> None:
    """Gives the restored samples of a resumed run their rows again. Groups that cannot have theirs begin again."""
    wanted, why = tracker.without_rows(), "its rows were not among those that the checkpoint saved"
    if not len(wanted):
        return
    try:
        for row in await generation.restore_rows(directory, wanted):
            tracker.restored(row)
    except (Retryable, DeadlineExceeded, ArenaFull, RemoteError, WireError) as error:
        why = f"the rows of the checkpoint could not be restored: {error}"
        tracker.observe(Warned(f"{why}; the {len(wanted)} samples that waited for training are sampled again"))
    for group in dict.fromkeys(row.group for row in tracker.without_rows()):
        tracker.restart(group, why)


def write_terms(directory: str, terms: Terms) -> dict[str, str]:
    """Writes the terms into the folder of a checkpoint, fsynced. Returns the SHA-256 by the name of the file."""
    data = json.dumps([[*key, dict(own)] for key, own in terms.items()]).encode()
    with (Path(directory) / READY_TERMS).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {READY_TERMS: sha256(data).hexdigest()}


def read_terms(directory: str) -> Terms:
    """Reads the terms; none from a checkpoint without samples that wait, or of a version that saved none."""
    path = Path(directory) / READY_TERMS
    found = json.loads(path.read_bytes()) if path.exists() else []
    return {(group, member): own for group, member, own in found}
