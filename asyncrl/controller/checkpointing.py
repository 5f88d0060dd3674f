"""Makes checkpoints while the run goes on: commits in the background, and rows of samples, which a resume gives back.

    between two iterations   rows are saved and the trainer's state is copied ──> begin returns
    meanwhile                files, manifest, rename: the commit (journal/checkpoints.py)
    the next begin, or end   waits for it, and raises its error

A checkpoint is of the journal as it was between the iterations; records that follow lie behind it. The first one of a
run is waited for: without it nothing that is drawn could be taken up again.

The rows of READY samples, and of episodes up to their newest answered turn, outlive a checkpoint:

    commit ──> Training.save_rows: a file of the checkpoint; the manifest lists the samples; the terms of their scores
    resume ──> record `Restored` ──> Gate.restore ──> Generation.restore_rows ──> READY samples have rows again
      └────> record `AttemptStarted` ───────────────────────────┘     └──> the new attempt continues an episode

Only what the checkpoint itself has is restored, so no sample of steps that a resume does again comes back. A sample
keeps its versions: the gate drops it when it is too old, and an episode with a token that is too old begins anew.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Self

from asyncrl.config.schema import TrainingConfig
from asyncrl.controller.journal.checkpoints import Spared, commit, nothing_spared, versions
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.observers.events import Warned
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.errors import ArenaFull, DeadlineExceeded, RemoteError, Retryable, WireError
from asyncrl.protocols.batch import BatchRef, RowRef, SampleName
from asyncrl.protocols.messages import Checkpointed
from asyncrl.protocols.service_contracts import Generation, Training

# ---- rows of samples that a checkpoint has -------------------------------------------------------------------------


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


CopyState = Callable[[str], Awaitable[Checkpointed]]
"""Saves rows into a directory, and lets the trainers copy their state. Returns the files that it has written."""
WriteCopies = Callable[[str], Awaitable[Checkpointed]]
"""Lets the trainers write what they copied into a directory. Returns its files."""


class BackgroundCommits:
    """Commits one checkpoint at a time. At the end of its scope it waits for the running commit, whose state was copied
    already, also where the run fails; only where the run is cancelled it gives the commit up.

    TrainingRun calls it between two iterations, and at the end.
    """

    def __init__(
        self,
        journal: Journal,
        settings: TrainingConfig,
        kept: Spared = nothing_spared,
        committed: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """Takes from the settings how many checkpoints stay, and whether `begin` waits for the end of the commit. kept:
        as in `commit`. committed: takes the version of each checkpoint."""
        self._journal = journal
        self._settings = settings
        self._kept = kept
        self._committed = committed
        self._running: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if (running := self._running) is None:
            return
        if isinstance(error, asyncio.CancelledError):
            running.cancel()
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as cancelled:
            error = cancelled
            running.cancel()
            await asyncio.wait({running})  # Nobody else may write to the journal or the checkpoints meanwhile.
            raise
        finally:
            if error is not None and not running.cancelled() and (own := running.exception()) is not None:
                error.add_note(f"besides, a checkpoint was not committed: {own}")
        if error is None:
            running.result()

    async def begin(self, version: int, copy: CopyState, write: WriteCopies) -> None:
        """Commits the checkpoint of the journal's version, while no iteration runs, and returns once its state is
        copied. Raises what `copy` raises, and errors of the commit before it."""
        await self.finish()
        has_one = bool(versions(self._journal.store))
        copied = asyncio.Event()
        work = self._commit(version, copy, write, copied)
        self._running = asyncio.create_task(work, name=f"checkpoint {version}")
        waiting = asyncio.create_task(copied.wait(), name="copies of a checkpoint")
        try:
            await asyncio.wait({self._running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not (self._settings.background_checkpoints and has_one) or self._running.done():
            await self.finish()

    def check(self) -> None:
        """Raises the error of a commit that has ended with one."""
        if self._running is not None and self._running.done():
            self._running.result()

    async def finish(self) -> None:
        """Waits until no commit runs. Raises what it raised: OSError, RemoteError, JournalError, FleetFailed."""
        if (running := self._running) is not None:
            await asyncio.wait({running})  # A cancelled wait leaves it to the end of the scope.
            self._running = None
            running.result()

    async def _commit(self, version: int, copy: CopyState, write: WriteCopies, copied: asyncio.Event) -> None:
        async def copy_and_write(directory: str) -> Checkpointed:
            saved = await copy(directory)
            copied.set()
            return Checkpointed.merge([await write(directory), saved])

        await commit(self._journal, copy_and_write, self._settings.keep_checkpoints, self._kept)
        if self._committed is not None:
            await self._committed(version)
