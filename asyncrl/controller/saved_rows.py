"""The rows of READY samples, and of episodes up to their newest answered turn, outlive a checkpoint: it saves them.

    commit ──> Training.save_rows: a file of the checkpoint; the manifest lists the samples; the terms of their scores
    resume ──> record `Restored` ──> Gate.restore ──> Generation.restore_rows ──> READY samples have rows again
        └────> record `AttemptStarted` ───────────────────────────┘     └──> the new attempt continues an episode

Only what the checkpoint itself has is restored, so no sample of steps that a resume does again comes back. A sample
keeps its versions: the gate drops it when it is too old, and an episode with a token that is too old begins anew.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from asyncrl.controller.observers.events import Warned
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.errors import ArenaFull, DeadlineExceeded, RemoteError, Retryable, WireError
from asyncrl.protocols.batch import BatchRef, RowRef, SampleName
from asyncrl.protocols.messages import Checkpointed
from asyncrl.protocols.service_contracts import Generation, Training

READY_TERMS = "ready-terms.json"
"""The file of a checkpoint with the terms of the scores of READY samples, which metrics and shown samples name."""

Terms = Mapping[tuple[int, int], Mapping[str, float]]
"""Terms of scores by (group, member)."""


async def save_rows(training: Training, samples: BatchRef, directory: str) -> Checkpointed:
    """Lets the trainer write the rows of these samples into the folder of a checkpoint."""
    return await training.save_rows(directory, samples) if len(samples) else Checkpointed(0, "", {})


async def save_rows_and_terms(
    training: Training, samples: BatchRef, directory: str, terms_of: Callable[[Iterable[tuple[int, int]]], Terms]
) -> Checkpointed:
    """Lets the trainer write rows, and writes the terms of the scores of those that it has saved."""
    saved = await save_rows(training, samples, directory)
    if not saved.ready:
        return saved
    terms = terms_of((group, member) for group, member, _ in saved.ready)
    return replace(saved, files=saved.files | await asyncio.to_thread(write_terms, directory, terms))


async def restore_rows(
    generation: Generation, tracker: SampleTracker, directory: str, answered: Sequence[SampleName] = ()
) -> None:
    """Gives the restored samples of a resumed run their rows again. answered: names of saved rows of episodes that ran.
    Groups and episodes that cannot have theirs begin again."""
    waiting = tracker.without_rows()
    why = "its rows were not among those that the checkpoint saved"
    wanted = BatchRef((*waiting, *map(_named, answered)))
    if not len(wanted):
        return
    turns = {*answered}
    try:
        for row in await generation.restore_rows(directory, wanted):
            (tracker.turns_restored if row.name in turns else tracker.restored)(row)
    except (Retryable, DeadlineExceeded, ArenaFull, RemoteError, WireError) as error:
        why = f"the rows of the checkpoint could not be restored: {error}"
        lost = f"the {len(waiting)} samples that waited for training, and {len(turns)} episodes, are sampled again"
        tracker.observe(Warned(f"{why}; {lost}"))
    for group in dict.fromkeys(row.group for row in tracker.without_rows()):
        tracker.restart(group, why)


def _named(sample: SampleName) -> RowRef:
    """Returns a reference that asks for a saved row by its name."""
    return RowRef(*sample, incarnation=0, prompt_tokens=0, tokens=0, first=0, last=0, finish="", places=())


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
