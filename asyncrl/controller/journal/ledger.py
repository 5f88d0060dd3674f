"""The ledger of a run: the records of what happens to samples, and the state that follows from them.

The ledger checks the gate without using the gate's rules: samples move along legal transitions, attempts rise, and a
(group, member) is trained at most once.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from asyncrl.controller.gate.group_state import DROPPABLE, IN_FLIGHT, Cut, GroupState, SampleState, Stage
from asyncrl.errors import IllegalTransition, JournalError, TrainedTwice
from asyncrl.protocols.hash_chain import GENESIS, chain

SampleKey: TypeAlias = tuple[int, int]
"""(group, member)."""

MOST_MEMBERS = 1 << 16
"""Members of one group: far more than any run samples, so that a damaged record cannot ask for all memory."""


READY_OR_TRAINED = (Stage.READY, Stage.TRAINED)
SETTLING = ("restarted", "restored")
"""Words for the first move of a sample after a resume: every sample that was in flight is restarted or restored."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A group was put in flight at this version, with this many members, in attempt 0."""

    group: int
    version: int
    members: int


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """These members begin again in attempt `number` of their group."""

    group: int
    number: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Generated:
    """Samples left the engine. samples: member, versions of first and last token, number of sampled tokens."""

    group: int
    attempt: int
    samples: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample has its reward. A sample that cannot be scored is `Dropped` instead."""

    group: int
    member: int
    reward: float


@dataclass(frozen=True, slots=True)
class Compared:
    """The greedy answer of a group has its reward, with which the samples are compared. The answer never trains."""

    group: int
    reward: float


@dataclass(frozen=True, slots=True)
class Trained:
    """An iteration led to `version`; samples of these cuts, and no others, entered its loss.

    advantages: of each sample, in the order of the cuts. chain: hex, as the trainer computed it.
    """

    version: int
    cuts: tuple[Cut, ...]
    advantages: tuple[float, ...]
    chain: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """These members leave without training.

    reason: "stale", "unscorable", "bad_row", "no_baseline", "no_signal", "greedy_unscorable", "poison" or a word of the
    user's algorithm; of samples that a step was given, "stale", "truncated", "rejected", "not finite" or "left out".
    """

    group: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class InFlight:
    """Every sample in flight, by group, at a checkpoint or a clean exit."""

    groups: tuple[Cut, ...]


@dataclass(frozen=True, slots=True)
class CheckpointMade:
    """A hint: the checkpoint of `version`, with this digest of its manifest, was committed before this record."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run went back to where the journal was `offset` bytes long; the records from there to here are void."""

    incarnation: int
    version: int
    offset: int


@dataclass(frozen=True, slots=True)
class Restored:
    """READY samples that go on after a resume as they are, with the rows that the checkpoint has saved."""

    groups: tuple[Cut, ...]


Record = (
    Drawn
    | AttemptStarted
    | Generated
    | Scored
    | Compared
    | Trained
    | Dropped
    | InFlight
    | CheckpointMade
    | Resumed
    | Restored
)

KINDS: dict[str, type[Record]] = {
    "drawn": Drawn,
    "attempt": AttemptStarted,
    "generated": Generated,
    "scored": Scored,
    "compared": Compared,
    "trained": Trained,
    "dropped": Dropped,
    "in_flight": InFlight,
    "checkpoint": CheckpointMade,
    "resumed": Resumed,
    "restored": Restored,
}


@dataclass
class Ledger:
    """Derives the state of the run from the records so far. Finished groups are forgotten.

    version, incarnation: of the run. next_group: id of the next draw. chain: recomputed from the trained samples.
    drawn, trained, dropped: samples since the beginning; dropped by reason. unsettled: members by group that were in
    flight when the run was resumed, and are neither restarted nor restored yet; until then they do not move.
    """

    version: int = 0
    incarnation: int = 0
    next_group: int = 0
    chain: bytes = GENESIS
    drawn: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    groups: dict[int, GroupState] = field(default_factory=dict)
    unsettled: dict[int, set[int]] = field(default_factory=dict)

    def apply(self, record: Record) -> None:
        """Takes in a record. Raises IllegalTransition or TrainedTwice, with nothing changed, for an illegal one."""
        _APPLY[type(record)](self, record)

    def _drawn(self, record: Drawn) -> None:
        if record.group != self.next_group:
            raise IllegalTransition(f"group {record.group} was drawn; the next one is {self.next_group}")
        if record.version != self.version:
            raise IllegalTransition(f"group {record.group} was drawn at version {record.version}, not {self.version}")
        if not 0 < record.members <= MOST_MEMBERS:
            raise IllegalTransition(f"group {record.group} was drawn with {record.members} members")
        samples = [SampleState() for _ in range(record.members)]
        self.groups[record.group] = GroupState(record.group, record.version, samples)
        self.next_group += 1
        self.drawn += record.members

    def _attempt_started(self, record: AttemptStarted) -> None:
        group = self._group(record.group, "restarted")
        if record.number <= group.attempt:
            raise IllegalTransition(
                f"group {record.group}: attempt {record.number} follows attempt {group.attempt}; attempts rise"
            )
        samples = [self._sample(record.group, member, IN_FLIGHT, "restarted") for member in record.members]
        group.attempt = record.number
        self._settle(record.group, record.members)
        for sample in samples:
            sample.stage = Stage.RUNNING
            sample.attempt = record.number
            sample.reward = None

    def _generated(self, record: Generated) -> None:
        for member, *_ in record.samples:
            sample = self._sample(record.group, member, (Stage.RUNNING,), "generated")
            if sample.attempt != record.attempt:
                raise IllegalTransition(
                    f"sample {(record.group, member)}: generated in attempt {record.attempt}, "
                    f"while attempt {sample.attempt} runs"
                )
        for member, first, last, tokens in record.samples:
            sample = self.groups[record.group].samples[member]
            sample.stage = Stage.SCORING
            sample.first = first
            sample.last = last
            sample.tokens = tokens

    def _scored(self, record: Scored) -> None:
        sample = self._sample(record.group, record.member, (Stage.SCORING,), "scored")
        sample.stage = Stage.READY
        sample.reward = record.reward

    def _compared(self, record: Compared) -> None:
        group = self._group(record.group, "compared")
        if group.greedy is not None:
            raise IllegalTransition(f"group {record.group} cannot be compared: its greedy answer had its reward before")
        group.greedy = record.reward

    def _trained(self, record: Trained) -> None:
        samples = self._to_train(record)
        self.chain = self._link(samples)
        for sample in samples.values():
            sample.stage = Stage.TRAINED
        self.trained += len(samples)
        self.version = record.version
        for group, _ in record.cuts:
            self._forget(group)

    def chain_after(self, record: Trained) -> bytes:
        """Returns the chain that this record leads to, with nothing changed. Raises what `apply` raises."""
        return self._link(self._to_train(record))

    def _link(self, samples: Mapping[SampleKey, SampleState]) -> bytes:
        return chain(self.chain, [(*key, sample.attempt) for key, sample in samples.items()])

    def _dropped(self, record: Dropped) -> None:
        samples = [self._sample(record.group, member, DROPPABLE, "dropped") for member in record.members]
        for sample in samples:
            sample.stage = Stage.DROPPED
            sample.reason = record.reason
        self.dropped[record.reason] += len(samples)
        self._forget(record.group)

    def _listed(self, record: InFlight) -> None:
        if record.groups != self.in_flight():
            raise JournalError(difference(record.groups, self.in_flight()))

    def _checkpoint_made(self, record: CheckpointMade) -> None:
        if record.version > self.version:
            raise IllegalTransition(f"a checkpoint of version {record.version}, while the run is at {self.version}")

    def _resumed(self, record: Resumed) -> None:
        if record.incarnation <= self.incarnation or record.version != self.version:
            raise IllegalTransition(
                f"resumed as incarnation {record.incarnation}, version {record.version}; "
                f"the journal was at incarnation {self.incarnation}, version {self.version} there"
            )
        self.incarnation = record.incarnation
        self.unsettled = {group: set(members) for group, members in self.in_flight()}

    def _restored(self, record: Restored) -> None:
        for group, member in ((group, member) for group, members in record.groups for member in members):
            sample = self._sample(group, member, (Stage.READY,), "restored")
            if member not in self.unsettled.get(group, ()):
                raise IllegalTransition(f"sample {(group, member)} cannot be restored: it began again, or no run did")
            if sample.last > self.version:
                raise IllegalTransition(
                    f"sample {(group, member)} of version {sample.last} cannot be restored at version {self.version}"
                )
        for group, members in record.groups:
            self._settle(group, members)

    def _settle(self, group: int, members: tuple[int, ...]) -> None:
        if group in self.unsettled:
            self.unsettled[group].difference_update(members)
            if not self.unsettled[group]:
                del self.unsettled[group]

    def in_flight(self) -> tuple[Cut, ...]:
        """Returns the members neither trained nor dropped, by group, both rising: derived, not counted."""
        return tuple((group, self.groups[group].members(*IN_FLIGHT)) for group in sorted(self.groups))

    @property
    def samples_in_flight(self) -> int:
        return sum(len(members) for _, members in self.in_flight())

    def balanced(self) -> bool:
        return self.drawn == self.trained + self.dropped.total() + self.samples_in_flight

    def _group(self, group: int, what: str) -> GroupState:
        if group in self.groups:
            return self.groups[group]
        state = "has finished" if group < self.next_group else "was never drawn"
        raise IllegalTransition(f"group {group} cannot be {what}: it {state}")

    def _sample(self, group: int, member: int, stages: tuple[Stage, ...], what: str) -> SampleState:
        samples = self._group(group, what).samples
        if not 0 <= member < len(samples):
            raise IllegalTransition(f"sample {(group, member)} cannot be {what}: the group has {len(samples)} members")
        if samples[member].stage not in stages:
            raise IllegalTransition(f"sample {(group, member)} cannot be {what}: it is {samples[member].stage.value}")
        if what not in SETTLING and member in self.unsettled.get(group, ()):
            raise IllegalTransition(
                f"sample {(group, member)} cannot be {what}: it was neither restarted nor restored since the resume"
            )
        return samples[member]

    def _to_train(self, record: Trained) -> dict[SampleKey, SampleState]:
        """Returns the samples of a record. Raises IllegalTransition or TrainedTwice when they cannot be trained."""
        if record.version != self.version + 1:
            raise IllegalTransition(f"an iteration led from version {self.version} to {record.version}")
        samples: dict[SampleKey, SampleState] = {}
        for group, members in record.cuts:
            for member in members:
                if (group, member) in samples:
                    raise TrainedTwice(f"sample {(group, member)} cannot be trained: the record names it twice")
                samples[group, member] = self._ready(group, member)
        return samples

    def _ready(self, group: int, member: int) -> SampleState:
        finished = group not in self.groups and group < self.next_group
        if finished or self._sample(group, member, READY_OR_TRAINED, "trained").stage is Stage.TRAINED:
            raise TrainedTwice(f"sample {(group, member)} cannot be trained: it was trained or dropped before")
        return self.groups[group].samples[member]

    def _forget(self, group: int) -> None:
        if self.groups[group].finished:
            del self.groups[group]


_APPLY: dict[type[Record], Callable[[Ledger, Any], None]] = {
    Drawn: Ledger._drawn,
    AttemptStarted: Ledger._attempt_started,
    Generated: Ledger._generated,
    Scored: Ledger._scored,
    Compared: Ledger._compared,
    Trained: Ledger._trained,
    Dropped: Ledger._dropped,
    InFlight: Ledger._listed,
    CheckpointMade: Ledger._checkpoint_made,
    Resumed: Ledger._resumed,
    Restored: Ledger._restored,
}


def difference(listed: tuple[Cut, ...], derived: tuple[Cut, ...]) -> str:
    here = frozenset(listed)
    there = frozenset(derived)
    surplus = [cut for cut in listed if cut not in there][:5]
    missing = [cut for cut in derived if cut not in here][:5]
    return f"the in-flight list holds {surplus} and lacks {missing}, by the records before it"
