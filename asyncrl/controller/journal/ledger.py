"""The journal of a run and the state that follows from its records. The controller is its only writer.

The ledger checks the gate without using the gate's rules: samples move along legal transitions, attempts rise, and a
(group, member) is trained at most once. No record is flushed by itself: a write survives the death of its process, and
a power cut loses only records after the last checkpoint, where a resumed run begins.
"""

from collections import Counter
from collections.abc import Iterator
from functools import singledispatchmethod
from zlib import crc32

from asyncrl.controller.gate.group_state import DROPPABLE, IN_FLIGHT, Cut, GroupState, SampleState, Stage
from asyncrl.controller.journal.journal_records import (
    AttemptStarted,
    CheckpointMade,
    Compared,
    Drawn,
    Dropped,
    Framed,
    Generated,
    InFlight,
    Record,
    Resumed,
    Scan,
    Scored,
    Trained,
    encode,
    void_ranges,
)
from asyncrl.controller.journal.journal_store import Store
from asyncrl.errors import IllegalTransition, JournalError, TrainedTwice
from asyncrl.protocols.hash_chain import GENESIS, chain

ANY = tuple(Stage)
MOST_MEMBERS = 1 << 16
"""Members of one group: far more than any run samples, so that a damaged record cannot ask for all memory."""


class Ledger:
    """Derives the state of the run from the records so far. Finished groups are forgotten.

    version, incarnation: of the run. next_group: id of the next draw. chain: recomputed from the trained samples.
    drawn, trained, dropped: samples since the beginning; dropped by reason.
    """

    def __init__(self) -> None:
        self.version = 0
        self.incarnation = 0
        self.next_group = 0
        self.chain = GENESIS
        self.drawn = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.groups: dict[int, GroupState] = {}

    @singledispatchmethod
    def apply(self, record: Record) -> None:
        """Takes in a record. Raises IllegalTransition or TrainedTwice, with nothing changed, for an illegal one."""
        raise AssertionError(f"no record: {record!r}")

    @apply.register
    def _(self, record: Drawn) -> None:
        if record.group != self.next_group:
            raise IllegalTransition(f"group {record.group} was drawn; the next one is {self.next_group}")
        if record.version != self.version:
            raise IllegalTransition(f"group {record.group} was drawn at version {record.version}, not {self.version}")
        if not 0 < record.members <= MOST_MEMBERS:
            raise IllegalTransition(f"group {record.group} was drawn with {record.members} members")
        self.groups[record.group] = GroupState(
            record.group, record.version, [SampleState() for _ in range(record.members)]
        )
        self.next_group += 1
        self.drawn += record.members

    @apply.register
    def _(self, record: AttemptStarted) -> None:
        group = self._group(record.group, "restarted")
        if record.number <= group.attempt:
            raise IllegalTransition(
                f"group {record.group}: attempt {record.number} follows attempt {group.attempt}; attempts rise"
            )
        samples = [self._sample(record.group, member, IN_FLIGHT, "restarted") for member in record.members]
        group.attempt = record.number
        for sample in samples:
            sample.stage = Stage.RUNNING
            sample.attempt = record.number
            sample.reward = None

    @apply.register
    def _(self, record: Generated) -> None:
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

    @apply.register
    def _(self, record: Scored) -> None:
        sample = self._sample(record.group, record.member, (Stage.SCORING,), "scored")
        sample.stage = Stage.READY
        sample.reward = record.reward

    @apply.register
    def _(self, record: Compared) -> None:
        group = self._group(record.group, "compared")
        if group.greedy is not None:
            raise IllegalTransition(f"group {record.group} cannot be compared: its greedy answer had its reward before")
        group.greedy = record.reward

    @apply.register
    def _(self, record: Trained) -> None:
        if record.version != self.version + 1:
            raise IllegalTransition(f"an iteration led from version {self.version} to {record.version}")
        samples = [self._to_train(group, member) for group, members in record.cuts for member in members]
        self.chain = chain(self.chain, self.keys(record.cuts))
        for sample in samples:
            sample.stage = Stage.TRAINED
        self.trained += len(samples)
        self.version = record.version
        for group, _ in record.cuts:
            self._forget(group)

    @apply.register
    def _(self, record: Dropped) -> None:
        samples = [self._sample(record.group, member, DROPPABLE, "dropped") for member in record.members]
        for sample in samples:
            sample.stage = Stage.DROPPED
            sample.reason = record.reason
        self.dropped[record.reason] += len(samples)
        self._forget(record.group)

    @apply.register
    def _(self, record: InFlight) -> None:
        if record.groups != self.in_flight():
            raise JournalError(difference(record.groups, self.in_flight()))

    @apply.register
    def _(self, record: CheckpointMade) -> None:
        if record.version > self.version:
            raise IllegalTransition(f"a checkpoint of version {record.version}, while the run is at {self.version}")

    @apply.register
    def _(self, record: Resumed) -> None:
        if record.incarnation <= self.incarnation or record.version != self.version:
            raise IllegalTransition(
                f"resumed as incarnation {record.incarnation}, version {record.version}; "
                f"the journal was at incarnation {self.incarnation}, version {self.version} there"
            )
        self.incarnation = record.incarnation

    # ---- looking -----------------------------------------------------------------------------------------

    def in_flight(self) -> tuple[Cut, ...]:
        """Returns the members neither trained nor dropped, by group, both rising: derived, not counted."""
        return tuple((group, self.groups[group].members(*IN_FLIGHT)) for group in sorted(self.groups))

    def keys(self, cuts: tuple[Cut, ...]) -> list[tuple[int, int, int]]:
        """Returns (group, member, attempt) of these samples in flight."""
        return [
            (group, member, self.groups[group].samples[member].attempt) for group, members in cuts for member in members
        ]

    def balanced(self) -> bool:
        """Returns whether drawn = trained + dropped + in flight."""
        in_flight = sum(len(members) for _, members in self.in_flight())
        return self.drawn == self.trained + self.dropped.total() + in_flight

    # ---- parts -------------------------------------------------------------------------------------------

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
        return samples[member]

    def _to_train(self, group: int, member: int) -> SampleState:
        finished = group not in self.groups and group < self.next_group
        if finished or self._sample(group, member, ANY, "trained").stage is Stage.TRAINED:
            raise TrainedTwice(f"sample {(group, member)} cannot be trained: it was trained or dropped before")
        return self._sample(group, member, (Stage.READY,), "trained")

    def _forget(self, group: int) -> None:
        if not self.groups[group].members(*IN_FLIGHT):
            del self.groups[group]


def difference(listed: tuple[Cut, ...], derived: tuple[Cut, ...]) -> str:
    """Describes where an in-flight list differs from the derived one."""
    surplus = [cut for cut in listed if cut not in derived][:5]
    missing = [cut for cut in derived if cut not in listed][:5]
    return f"the in-flight list holds {surplus} and lacks {missing}, by the records before it"


def resumes(store: Store, until: int | None = None) -> list[tuple[int, Resumed]]:
    """Returns (byte, record) of every resume in the first `until` bytes, void ones included."""
    scan = Scan(store.read, store.size if until is None else until)
    return [(framed.start, framed.record) for framed in scan if isinstance(framed.record, Resumed)]


def surviving(store: Store, until: int | None = None) -> Iterator[Framed]:
    """Iterates over the records in the first `until` bytes that no resume made void, in order."""
    void = void_ranges(resumes(store, until))
    for framed in Scan(store.read, store.size if until is None else until):
        if not any(low <= framed.start < high for low, high in void):
            yield framed


def replay(store: Store, until: int | None = None) -> Ledger:
    """Returns the ledger after the surviving records of the first `until` bytes. Raises JournalError with the byte."""
    ledger = Ledger()
    for framed in surviving(store, until):
        try:
            ledger.apply(framed.record)
        except JournalError as error:
            raise type(error)(f"journal, byte {framed.start}: {error}") from error
    return ledger


class Journal:
    """Appends records to a store, through the ledger, which refuses illegal records before they are written.

    torn: bytes of an unfinished last record that were cut off when the journal was opened.
    offset, crc: length and crc32 of the journal.
    """

    def __init__(self, store: Store) -> None:
        scan = Scan(store.read, store.size)
        for _ in scan:
            pass
        self.store = store
        self.torn = store.size - scan.end
        if self.torn:
            store.truncate(scan.end)
        self.offset = scan.end
        self.crc = scan.crc
        self.ledger = replay(store)

    def append(self, record: Record) -> None:
        """Appends a record. Raises JournalError, with nothing written, if it contradicts the records before it."""
        self.ledger.apply(record)
        if isinstance(record, Trained) and record.chain != self.ledger.chain.hex():
            raise JournalError(
                f"the trainer did not train what the journal says for version {record.version}: "
                f"its chain is {record.chain[:16]}, by the records it is {self.ledger.chain.hex()[:16]}"
            )
        frame = encode(record)
        self.store.append(frame)
        self.offset += len(frame)
        self.crc = crc32(frame, self.crc)

    def sync(self) -> None:
        """Makes what was appended survive a power cut."""
        self.store.sync()

    def resume(self, incarnation: int, offset: int) -> None:
        """Goes back to where the journal was `offset` bytes long; the records after it are void.

        The groups in flight there begin a new attempt. Raises JournalError when that point is void itself.
        """
        ledger = replay(self.store, offset)
        resumed = Resumed(incarnation, ledger.version, offset)
        void_ranges([*resumes(self.store), (self.offset, resumed)])
        self.ledger = ledger
        self.append(resumed)
        for group, members in ledger.in_flight():
            self.append(AttemptStarted(group, ledger.groups[group].attempt + 1, members, "resumed"))
