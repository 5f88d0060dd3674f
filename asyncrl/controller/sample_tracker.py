"""Keeps gate, journal and observers in step: every change of a sample's state is made here, in all three or in none."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from sys import intern

from asyncrl.controller.gate.admission import Admission
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import DROPPABLE, OPEN, Cut, GroupState, Stage
from asyncrl.controller.journal import ledger
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.observers.events import GroupFinished, Observe, SampleScored
from asyncrl.objectives.advantages import RewardedCut
from asyncrl.protocols.batch import GREEDY, BatchRef, Place, RowRef, SampleName
from asyncrl.protocols.messages import Score
from asyncrl.rewards.sample import BAD_ROW

POISON = "poison"
"""The reason of a drop that is no progress of the run."""

MOST_SAVED = 8192
"""Samples of which a checkpoint saves the rows: their references take 70 ms of CPU. Others are sampled again after a
resume."""

NO_GREEDY = "greedy_unscorable"
"""The reason of a drop of a group whose greedy answer has no reward, so that no sample can be compared with it."""


@dataclass
class SampleTracker:
    """Tracks every sample in flight. What it knows of a sample or group is in the gate's state of it.

    release: takes samples whose rows, up to these attempts, may be freed. changed: called when a group may be drawn, or
    a batch may be complete. ready: called in its place when a score cannot make room for a group.
    """

    gate: Gate
    journal: Journal
    observe: Observe
    release: Callable[[Iterable[SampleName]], None]
    changed: Callable[[], None]
    ready: Callable[[], None]
    _columns: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.admission = Admission(self.gate.config)
        self._groups_by_owner: dict[str, set[int]] = {}
        self._owners: dict[int, set[str]] = {}
        """Owners that have stored rows of each group in flight; `_groups_by_owner` is the inverse."""

    def may_draw(self) -> bool:
        """Returns whether the gate has room for a further group and the trainer will need it in time."""
        return self.gate.may_draw() and self.admission.allows(self._waiting)

    @property
    def is_settled(self) -> bool:
        """Returns whether no sample runs, is scored or awaits a comparison, and none is to be drawn."""
        is_open = any(self.gate.counts[stage] for stage in OPEN) or self.gate.awaited
        return not is_open and not self.may_draw()

    @property
    def _waiting(self) -> int:
        return self.gate.held() - self.gate.counts[Stage.TRAINING]

    def admission_metrics(self) -> dict[str, float]:
        return {"staleness/admitted": float(self._waiting), "staleness/admission_bound": float(self.admission.bound)}

    def rows(self, group: int, members: Iterable[int]) -> list[RowRef]:
        samples = self.gate.group(group).samples
        return [row for member in members if (row := samples[member].row) is not None]

    def groups_at(self, instance: str) -> list[int]:
        """Returns the groups with members that wait for scores or training and have rows at this worker."""
        owners = [owner for owner in self._groups_by_owner if instance in owner]
        groups = sorted(group for owner in owners for group in self._groups_by_owner[owner])
        waiting = [(group, self.gate.members(group, Stage.SCORING, Stage.READY)) for group in dict.fromkeys(groups)]
        return [cut[0] for cut in waiting if any(stored_by(row, instance) for row in self.rows(*cut))]

    def _keep(self, state: GroupState, row: RowRef) -> None:
        """Keeps the reference of a sample in flight, and notes the owners of its columns."""
        state.samples[row.member].row = row
        owners = self._owners.setdefault(row.group, set())
        for place in row.places:
            if place.owner not in owners:
                owners.add(place.owner)
                self._groups_by_owner.setdefault(place.owner, set()).add(row.group)

    def _forget_owners(self, group: int) -> None:
        for owner in self._owners.pop(group, ()):
            self._groups_by_owner[owner].remove(group)
            if not self._groups_by_owner[owner]:
                del self._groups_by_owner[owner]

    def rows_to_save(self) -> BatchRef:
        """Returns the samples that wait for training, then episodes up to their newest answered turn: those of the
        oldest groups first, and at most MOST_SAVED."""
        cuts = ((group, self.gate.members(group, Stage.READY)) for group in self.gate.groups())
        rows = (row for group, members in cuts for row in self.rows(group, members))
        return BatchRef(tuple(islice(chain(rows, self._answered_rows()), MOST_SAVED)))

    def _answered_rows(self) -> Iterator[RowRef]:
        """Yields the rows of running episodes that the environment answered in their present attempt: a resume finds
        them by the attempt that the journal says."""
        for group in self.gate.groups():
            for member in self.gate.members(group, Stage.RUNNING):
                sample = self.gate.group(group).samples[member]
                if sample.answered is not None and sample.answered.attempt == sample.attempt:
                    yield sample.answered

    def without_rows(self) -> BatchRef:
        """Returns the samples that wait for training and whose rows a resume has yet to restore: what is known of them,
        and no place."""
        incarnation = self.journal.ledger.incarnation
        return BatchRef(
            tuple(
                RowRef(group, member, sample.attempt, incarnation, 0, sample.tokens, sample.first, sample.last, "", ())
                for group in self.gate.groups()
                for member, sample in enumerate(self.gate.group(group).samples)
                if sample.stage is Stage.READY and sample.row is None
            )
        )

    def restored(self, row: RowRef) -> None:
        """Takes the row of a READY sample that a resume has restored, if it is the one that the journal knows."""
        state = self.gate.group(row.group)
        sample = state.samples[row.member]
        known = (sample.attempt, sample.first, sample.last, sample.tokens, sample.reward)
        if known == (row.attempt, row.first, row.last, row.tokens, row.reward):
            self.gate.parts_restored(row.group, row.member, row.turn_rewards)
            self._keep(state, self._compact(row))

    def turns_restored(self, row: RowRef) -> None:
        """Takes the row of a running episode that a resume has restored: its attempt, which has yet to begin, goes on
        there. A row that does not belong to it is freed."""
        state = self.gate.group(row.group)
        sample = state.samples[row.member]
        if sample.stage is Stage.RUNNING and row.attempt < sample.attempt and row.last <= self.gate.version:
            sample.answered = self._compact(row)
        else:
            self.release([row.name])

    def draw(self) -> int:
        drawn = ledger.Drawn(self.gate.draw(), self.gate.version, self.gate.config.members)
        self.journal.append(drawn)
        self.observe(drawn)
        return drawn.group

    def restart(self, group: int, reason: str) -> None:
        state = self.gate.group(group)
        members = state.members(*DROPPABLE)
        old = state.attempt
        answered = {member: row for member in members if (row := state.samples[member].answered) is not None}
        started = ledger.AttemptStarted(group, self.gate.restart(group, members), members, reason)
        self.journal.append(started)
        for member, row in answered.items():
            state.samples[member].answered = row
        begun = tuple(member for member in members if member not in answered)
        self._free(state, (*begun, GREEDY) if state.awaits else begun, old)
        self.observe(started)
        self.changed()

    def generated(self, samples: Iterable[RowRef]) -> None:
        """Takes samples of one attempt that left the engine. Late answers of an old attempt are refused and freed."""
        accepted = [row for row in samples if self._accepts(row)]
        if not accepted:
            return
        group = accepted[0].group
        attempt = accepted[0].attempt
        stamps = tuple((row.member, row.first, row.last, row.tokens) for row in accepted)
        generated = ledger.Generated(group, attempt, stamps)
        self.journal.append(generated)
        for row in accepted:
            self._keep(self.gate.group(group), self._compact(row))
            self.gate.group(group).samples[row.member].answered = None
        self.observe(generated)

    def _accepts(self, row: RowRef) -> bool:
        assert row.member != GREEDY, f"the greedy answer of group {row.group} is no sample: hand it to `compared`"
        if self.gate.generated(row.group, row.member, row.attempt, row.first, row.last, row.tokens):
            return True
        known = self._row(row)
        if known is None or known.name != row.name:
            self.release([row.name])
        return False

    def _row(self, row: RowRef) -> RowRef | None:
        if row.member == GREEDY or self.gate.finished(row.group):
            return None
        return self.gate.group(row.group).samples[row.member].row

    def answered(self, samples: Iterable[RowRef]) -> None:
        """Takes the rows of episodes that go on, after an answer of the environment: a new attempt begins there."""
        for row in samples:
            if row.member == GREEDY or self.gate.finished(row.group):
                continue
            sample = self.gate.group(row.group).samples[row.member]
            if sample.stage is Stage.RUNNING and sample.attempt == row.attempt:
                sample.answered = self._compact(row)

    def take_answered(self, group: int) -> list[RowRef]:
        """Returns the rows that an attempt may go on from, each once."""
        samples = [self.gate.group(group).samples[member] for member in self.gate.members(group, Stage.RUNNING)]
        rows = [sample.answered for sample in samples if sample.answered is not None]
        for sample in samples:
            sample.answered = None
        return rows

    def holds(self, row: RowRef) -> None:
        """Takes columns that another service made of a generated sample; those of an old attempt are freed."""
        known = self._row(row)
        if known is not None and known.attempt == row.attempt:
            self._keep(self.gate.group(row.group), self._compact(row))
        else:
            self.release([row.name])

    def scored(self, row: RowRef, score: Score, cost: float | None = None) -> None:
        """Takes the score of a sample, which is dropped without a reward. A score of an old attempt is refused."""
        reward = score.reward
        state = None if self.gate.finished(row.group) else self.gate.group(row.group)
        parts = score.by_turn(row.turns)
        without = BAD_ROW if score.bad_row else "unscorable"
        if not self.gate.scored(row.group, row.member, row.attempt, reward, parts, without) or state is None:
            if score.place is not None:
                self.release([row.name])
            return
        if score.place is not None:
            row = row.stored_at(score.place)
        sample = state.samples[row.member]
        known = sample.row
        kept = known if known is not None and known.places == row.places else self._compact(row)
        scored = kept.with_reward(reward, cost, parts)
        self._keep(state, scored)
        if reward is not None:
            self.journal.append(ledger.Scored(row.group, row.member, reward))
        self.observe(SampleScored(scored, score))
        if reward is None:
            self._dropped(state, (row.member,), without)
            self._close(state)
            self.changed()
        elif self.gate.worth_picking:
            self.ready()

    def _compact(self, row: RowRef) -> RowRef:
        """Returns the row with texts that all rows share; those of its message take half of the memory of a sample."""
        columns = self._columns
        places = [
            Place(intern(place.owner), place.slot, place.write_count, columns.setdefault(place.columns, place.columns))
            for place in row.places
        ]
        return row.with_places(tuple(places))

    def compared(self, row: RowRef, score: Score) -> None:
        """Takes the first score of a group's greedy answer and frees its row; without a reward the group is dropped."""
        assert row.member == GREEDY, f"sample {row.key} is no greedy answer: hand it to `ready`"
        self.release([row.name])
        if not self.gate.compared(row.group, row.attempt, score.reward):
            return
        if score.reward is None:
            self.drop(row.group, self.gate.members(row.group, *DROPPABLE), NO_GREEDY)
            return
        self.journal.append(ledger.Compared(row.group, score.reward))
        self.changed()

    def drop(self, group: int, members: Sequence[int], reason: str) -> None:
        state = self.gate.group(group)
        self.gate.drop(group, members, reason)
        self._dropped(state, tuple(members), reason)
        self._close(state, poison=reason == POISON)
        self.changed()

    def pick(self) -> tuple[Cut, ...] | None:
        pick = self.gate.pick()
        self.admission.observe(pick, self.gate.offered)
        for drop in pick.dropped:
            self._dropped(drop.group, drop.members, drop.reason)
        for state in {drop.group.id: drop.group for drop in pick.dropped}.values():
            self._close(state)
        if pick.dropped:
            self.changed()
        return pick.cuts

    def preview(self) -> list[RowRef]:
        return [row for group, members in self.gate.preview() for row in self.rows(group, members)]

    def rewarded(self, cuts: Iterable[Cut], counts: Callable[[RowRef], bool]) -> list[RewardedCut]:
        """Returns the cuts with every known reward of their groups. counts: whether a sample is in the loss."""
        rewarded = []
        for cut in cuts:
            state = self.gate.group(cut[0])
            tokens = {row.member: row.tokens if counts(row) else 0 for row in self.rows(*cut)}
            turns = {member: sample.turn_rewards for member, sample in enumerate(state.samples) if sample.turn_rewards}
            rewarded.append(RewardedCut(*cut, state.rewards(), tokens, state.greedy, turns))
        return rewarded

    def trained(self, cuts: tuple[Cut, ...], version: int, advantages: tuple[float, ...], chain: str) -> None:
        """Takes these cuts as trained by the iteration that led to `version`; raises what `Journal.append` does.

        What the journal refuses has not happened for the gate. Rows are freed before the stragglers of their group end.
        """
        self.journal.append(ledger.Trained(version, cuts, advantages, chain))
        states = [self.gate.group(group) for group, _ in cuts]
        self.gate.trained(cuts, version)
        for state, (_, members) in zip(states, cuts, strict=True):
            self._free(state, members)
            self._close(state)
        self.changed()

    def requeue(self, cuts: Iterable[Cut]) -> None:
        self.gate.requeue(cuts)
        self.changed()

    async def close(self) -> None:
        """Writes down what is in flight, at a clean exit."""
        self.journal.append(ledger.InFlight(self.journal.ledger.in_flight()))
        await self.journal.store.run(self.journal.sync)

    def _dropped(self, state: GroupState, members: tuple[int, ...], reason: str) -> None:
        dropped = ledger.Dropped(state.id, members, reason)
        self.journal.append(dropped)
        self._free(state, members)
        self.observe(dropped)

    def _free(self, state: GroupState, members: Iterable[int], attempt: int | None = None) -> None:
        """Releases rows up to an attempt, by default the newest; also rows that were made but not received yet."""
        last = state.attempt if attempt is None else attempt
        for member in members:
            if member != GREEDY:
                state.samples[member].row = None
        self.release([(state.id, member, last) for member in members])

    def _close(self, state: GroupState, *, poison: bool = False) -> None:
        if not state.finished:
            return
        if state.awaits:
            self._free(state, (GREEDY,))
        self._forget_owners(state.id)
        self.observe(GroupFinished(state.id, poison))


def stored_by(row: RowRef, instance: str) -> bool:
    """Returns whether this worker owns some column of the row: the address of an owner contains its instance."""
    return any(instance in place.owner for place in row.places)
