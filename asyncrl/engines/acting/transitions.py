"""Transitions of an environment as training reads them: one row has those of one environment, in order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.acting.stepping.spaces import Spaces
from asyncrl.protocols.batch import BYTES, IDS, NUMBERS, Batch, BatchRef, Column, Columns, SampleName
from asyncrl.protocols.messages import LEFT_OUT, TrainedSample
from asyncrl.protocols.staleness import POLICIES, Policy

Floats = NDArray[np.float32]


def transition_columns(spaces: Spaces, transitions: int) -> Columns:
    """Returns what an acting worker stores of so many transitions. actions: as the policy sampled them, see
    action_distributions; next_observations: before a reset; terminated: the episode ended by itself; truncated: a limit
    or a failure ended it; versions: of the weights that acted; returns, lengths: of the episodes that ended here."""
    return {
        "observations": (NUMBERS, transitions * spaces.observation),
        "actions": (NUMBERS, transitions * spaces.action.stored),
        "logprobs": (NUMBERS, transitions),
        "rewards": (NUMBERS, transitions),
        "next_observations": (NUMBERS, transitions * spaces.observation),
        "terminated": (BYTES, transitions),
        "truncated": (BYTES, transitions),
        "versions": (IDS, transitions),
        "returns": (NUMBERS, transitions),
        "lengths": (IDS, transitions),
    }


COLUMNS = tuple(
    transition_columns(Spaces.of({"observation": 1, "action": {"kind": "discrete", "size": 1}, "name": ""}), 1)
)
"""Names of the columns."""


@dataclass(slots=True)
class TransitionRow:
    """The transitions of one row, arrays [transitions] or [transitions, numbers], and what a step did with them.

    live: those that may enter the loss. trained: number of them that did; reason: why others did not.
    """

    name: SampleName
    observations: Floats
    actions: Floats
    logprobs: Floats
    rewards: Floats
    next_observations: Floats
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    versions: NDArray[np.int64]
    returns: Floats
    lengths: NDArray[np.int64]
    live: NDArray[np.bool_]
    trained: int = 0
    reason: str = ""

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def ended(self) -> NDArray[np.bool_]:
        return self.terminated | self.truncated

    def report(self) -> TrainedSample:
        """Returns what the step did with the transitions, after its last update."""
        masked = len(self) - self.trained
        reason = (self.reason or ("stale" if not self.live.all() else LEFT_OUT)) if masked else ""
        return TrainedSample(*self.name, self.trained, masked, reason)


def transition_rows(
    refs: BatchRef, rows: Batch, spaces: Spaces, incarnation: int, version: int, limit: int, policy: Policy
) -> list[TransitionRow]:
    """Joins references with their rows, which have the same order, and marks the transitions that are too old."""
    found = []
    for number, ref in enumerate(refs):
        row = {name: rows[name][number] for name in COLUMNS}
        versions = row["versions"].astype(np.int64)
        fresh = POLICIES[policy].live(versions, version, limit)
        found.append(
            TransitionRow(
                ref.name,
                observations=row["observations"].reshape(-1, spaces.observation),
                actions=row["actions"].reshape(-1, spaces.action.stored),
                logprobs=row["logprobs"],
                rewards=row["rewards"],
                next_observations=row["next_observations"].reshape(-1, spaces.observation),
                terminated=row["terminated"].astype(np.bool_),
                truncated=row["truncated"].astype(np.bool_),
                versions=versions,
                returns=row["returns"],
                lengths=row["lengths"].astype(np.int64),
                live=fresh & (ref.incarnation == incarnation),
            )
        )
    return found


def joined(rows: Sequence[TransitionRow], name: str) -> NDArray[np.generic]:
    """Returns one column of all rows."""
    return np.concatenate([getattr(row, name) for row in rows])


def batch_of(rows: Sequence[dict[str, NDArray[np.generic]]]) -> Batch:
    """Returns rows as one batch; each has all columns, one-dimensional."""
    return Batch({name: Column.of([row[name] for row in rows]) for name in COLUMNS})
