"""The rows of READY samples outlive a checkpoint: it saves them, and a run that resumes there trains them.

    commit ──> Training.save_rows: a file of the checkpoint; the manifest lists the samples
    resume ──> record `Restored` ──> Gate.restore ──> Generation.restore_rows ──> the samples have rows again

Only what the checkpoint itself has is restored, so no sample of steps that a resume does again comes back. A sample
keeps its versions, and the gate drops it when it is too old, as ever.
"""

from asyncrl.controller.observers.events import Warned
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.errors import ArenaFull, DeadlineExceeded, RemoteError, Retryable, WireError
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import Checkpointed
from asyncrl.protocols.service_contracts import Generation, Training


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
