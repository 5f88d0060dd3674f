"""Gate, journal and observers in step: every change of a sample's state is made here, in all of them, or nowhere."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from asyncrl import records
from asyncrl.events import AttemptFailed, GroupDrawn, GroupFinished, Observe, SampleScored, SamplesDropped
from asyncrl.groups import DROPPABLE
from asyncrl.ledger import Journal
from asyncrl.objectives.advantages import RewardedCut
from asyncrl.protocols.batch import GREEDY, RowRef, SampleName
from asyncrl.protocols.messages import Score
from asyncrl.staleness import Cut, Gate, Stage

POISON = "poison"
"""The reason of a drop that is no progress of the run."""

NO_GREEDY = "greedy_unscorable"
"""The reason of a drop of a group whose greedy answer has no reward, so that nothing can be compared with it."""


class Books:
    """What became of every sample in flight.

    release: told the samples whose rows, in these attempts and earlier ones, nobody needs any more.
    changed: told that something moved.
    """

    def __init__(
        self,
        gate: Gate,
        journal: Journal,
        observe: Observe,
        release: Callable[[Iterable[SampleName]], None],
        changed: Callable[[], None],
    ) -> None:
        self.gate, self.journal, self.observe = gate, journal, observe
        self._release, self._changed = release, changed
        self._rows: dict[int, dict[int, RowRef]] = {group: {} for group in gate.groups()}
        self._attempts = {group: journal.ledger.groups[group].attempt for group in gate.groups()}
        self._awaited = {group: None for group in gate.groups() if gate.awaits(group)}

    def attempt(self, group: int) -> int:
        """Number of the newest attempt at a group in flight."""
        return self._attempts[group]

    def rows(self, group: int, members: Iterable[int]) -> list[RowRef]:
        """Where these generated members lie, in order."""
        return [self._rows[group][member] for member in members]

    def groups_at(self, instance: str) -> list[int]:
        """Groups with members that wait for scores or training and have rows at this worker."""
        return [group for group in self._rows if any(lies_at(row, instance) for row in self._waiting(group))]

    def _waiting(self, group: int) -> list[RowRef]:
        return self.rows(group, self.gate.members(group, Stage.SCORING, Stage.READY))

    # ---- a sample's way ----------------------------------------------------------------------------------

    def draw(self) -> int:
        """The next group is in flight."""
        group, version = self.gate.draw(), self.gate.version
        self.journal.append(records.Drawn(group, version, self.gate.config.members))
        self._rows[group], self._attempts[group] = {}, 0
        self._awaited |= {group: None} if self.gate.awaits(group) else {}
        self.observe(GroupDrawn(group, version))
        return group

    def restart(self, group: int, reason: str, failures: int) -> None:
        """All members but those trained, dropped or just being trained begin again in a new attempt."""
        members = self.gate.members(group, Stage.RUNNING, Stage.SCORING, Stage.READY)
        number = self.gate.restart(group, members)
        self.journal.append(records.Attempt(group, number, members, reason))
        self._free(group, (*members, GREEDY) if group in self._awaited else members)
        self._attempts[group] = number
        self.observe(AttemptFailed(group, failures, members, reason))
        self._changed()

    def generated(self, samples: Iterable[RowRef]) -> None:
        """Samples of one attempt left the engine. Late answers of an old attempt are refused, their rows freed."""
        taken = [row for row in samples if self._took(row)]
        if not taken:
            return
        group, attempt = taken[0].group, taken[0].attempt
        stamps = tuple((row.member, row.first, row.last, row.tokens) for row in taken)
        self.journal.append(records.Generated(group, attempt, stamps))
        self._rows[group] |= {row.member: row for row in taken}

    def _took(self, row: RowRef) -> bool:
        assert row.member != GREEDY, f"the greedy answer of group {row.group} is no sample: hand it to `compared`"
        if self.gate.generated(row.group, row.member, row.attempt, row.first, row.last, row.tokens):
            return True
        held = self._rows.get(row.group, {}).get(row.member)
        if held is None or held.name != row.name:
            self._release([row.name])
        return False

    def holds(self, row: RowRef) -> None:
        """Another service made columns of a generated sample; those of an old attempt are freed."""
        held = self._rows.get(row.group, {}).get(row.member)
        if held is not None and held.attempt == row.attempt:
            self._rows[row.group][row.member] = row
        else:
            self._release([row.name])

    def scored(self, row: RowRef, score: Score, cost: float | None = None) -> None:
        """A sample has its reward, or cannot be scored and is dropped. The answer of an old attempt is refused."""
        reward = score.reward
        if not self.gate.scored(row.group, row.member, row.attempt, reward):
            return
        self._rows[row.group][row.member] = scored = row.with_reward(reward, cost)
        if reward is not None:
            self.journal.append(records.Scored(row.group, row.member, reward))
        self.observe(SampleScored(scored, score))
        if reward is None:
            self._dropped(row.group, (row.member,), "unscorable")
            self._close(row.group)
        if reward is None or self.gate.worth_picking:
            self._changed()

    def compared(self, row: RowRef, score: Score) -> None:
        """The greedy answer of a group was judged; its row is freed. Without a reward the group is dropped. The first
        one counts: that of an old attempt, or of a group that has one, is refused."""
        assert row.member == GREEDY, f"sample {row.key} is no greedy answer: hand it to `ready`"
        self._release([row.name])
        if not self.gate.compared(row.group, row.attempt, score.reward):
            return
        if score.reward is None:
            self.drop(row.group, self.gate.members(row.group, *DROPPABLE), NO_GREEDY)
            return
        self.journal.append(records.Compared(row.group, score.reward))
        del self._awaited[row.group]
        self._changed()

    def drop(self, group: int, members: Sequence[int], reason: str) -> None:
        """These members leave untrained."""
        self.gate.drop(group, members, reason)
        self._dropped(group, tuple(members), reason)
        self._close(group, poison=reason == POISON)
        self._changed()

    # ---- training ----------------------------------------------------------------------------------------

    def pick(self) -> tuple[Cut, ...] | None:
        """What to train next; None: wait."""
        pick = self.gate.pick()
        for (group, reason), drops in groupby(pick.dropped, key=lambda drop: (drop.group, drop.reason)):
            self._dropped(group, tuple(drop.member for drop in drops), reason)
        for group in dict.fromkeys(drop.group for drop in pick.dropped):
            self._close(group)
        if pick.dropped:
            self._changed()
        return pick.cuts

    def foreseen(self) -> list[RowRef]:
        """What would train next were no iteration running; [] while that is no full batch."""
        return [row for group, members in self.gate.foreseen() for row in self.rows(group, members)]

    def rewarded(self, cuts: Iterable[Cut], counts: Callable[[RowRef], bool]) -> list[RewardedCut]:
        """The cuts with every reward of their groups that is known now. counts: whether a sample is in the loss."""
        gate = self.gate
        return [RewardedCut(*cut, gate.rewards(cut[0]), self._tokens(cut, counts), gate.greedy(cut[0])) for cut in cuts]

    def _tokens(self, cut: Cut, counts: Callable[[RowRef], bool]) -> dict[int, int]:
        return {row.member: row.tokens if counts(row) else 0 for row in self.rows(*cut)}

    def trained(self, cuts: tuple[Cut, ...], version: int, advantages: tuple[float, ...], chain: str) -> None:
        """These cuts led to `version`. Written down first: what the journal refuses has not happened for the gate.
        Their rows are freed at once: a group may wait long for its stragglers, and its samples hold no credit then.

        Raises:
            TrainedTwice, IllegalTransition, JournalError: as `Journal.append`.
        """
        self.journal.append(records.Trained(version, cuts, advantages, chain))
        self.gate.trained(cuts, version)
        for group, members in cuts:
            self._free(group, members)
            self._close(group)
        self._changed()

    def requeue(self, cuts: Iterable[Cut]) -> None:
        """These cuts were not trained; they wait as before."""
        self.gate.requeue(cuts)
        self._changed()

    def close(self) -> None:
        """At a clean exit: write down what is in flight."""
        self.journal.append(records.InFlight(self.journal.ledger.in_flight()))
        self.journal.sync()

    # ---- parts -------------------------------------------------------------------------------------------

    def _dropped(self, group: int, members: tuple[int, ...], reason: str) -> None:
        self.journal.append(records.Dropped(group, members, reason))
        self._free(group, members)
        self.observe(SamplesDropped(group, members, reason))

    def _free(self, group: int, members: Iterable[int]) -> None:
        """Also what a worker made and nobody here has heard of yet."""
        attempt = self._attempts[group]
        for member in members:
            self._rows[group].pop(member, None)
        self._release([(group, member, attempt) for member in members])

    def _close(self, group: int, *, poison: bool = False) -> None:
        if self.gate.finished(group):
            if group in self._awaited:
                del self._awaited[group]
                self._free(group, (GREEDY,))
            del self._rows[group], self._attempts[group]
            self.observe(GroupFinished(group, poison))


def lies_at(row: RowRef, instance: str) -> bool:
    """Whether this worker owns some column of the row: an owner's address contains its instance."""
    return any(instance in place.owner for place in row.places)
