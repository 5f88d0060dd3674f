"""The gate decides what may be drawn, what is trained next and what is too old. Pure: no I/O, no clock, no asyncio.

A sample moves RUNNING -> SCORING -> READY -> TRAINING -> TRAINED, and from any of the first three to DROPPED. Under
`mask`, `drop` and `block` no token older than the limit enters the loss. Samples, not groups, hold credits and are
trained, so a straggler does not expire its siblings: a *cut* is the part of a group that trains together, usually all
of it. Ids of groups come from `draw`; asking about another id is an error of the caller. Every answer takes an
amortised time independent of what is in flight: a change of a group calls `_reconsider`, which keeps the indexes.
What follows from the policy, its rule says (protocols/staleness.py).

SampleCounts  how many samples are in which stage, and how old they are
CutQueue      which groups offer a cut, most urgent first      for Gate.pick and Gate.preview
StampIndex    which groups have READY samples of which age     for what becomes due or too old as the version rises
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.gate.group_state import (
    DROPPABLE,
    IN_FLIGHT,
    OPEN,
    Cut,
    Drop,
    EndedSample,
    GroupState,
    Pick,
    SampleState,
    Stage,
)
from asyncrl.errors import IllegalTransition
from asyncrl.protocols.staleness import live

# ---- what is in flight, counted sample by sample -------------------------------------------------------------------


class SampleCounts:
    """Counts samples by stage, and those in flight by the version that their group was drawn at.

    too_old: whether tokens sampled at a version may not enter the loss any more. overdue: RUNNING samples whose attempt
    began at such a version.

    The counts are those that a walk over all groups would give; the gate moves samples through here only.
    """

    def __init__(self, too_old: Callable[[int], bool]) -> None:
        self.stages = Counter[Stage]()
        self.drawn_at = Counter[int]()
        self.overdue = 0
        self._too_old = too_old
        self._running_since = Counter[int]()

    def add(self, group: GroupState) -> None:
        """Counts the members of a group that are in flight."""
        members = group.members(*IN_FLIGHT)
        self.drawn_at[group.drawn_at] += len(members)
        for member in members:
            self.count(group.samples[member], +1)

    def count(self, sample: SampleState, change: int) -> None:
        self.stages[sample.stage] += change
        if sample.stage is Stage.RUNNING and self._too_old(sample.since):
            self.overdue += change
        elif sample.stage is Stage.RUNNING:
            self._running_since[sample.since] += change

    def move(self, sample: SampleState, stage: Stage) -> None:
        """Moves a sample on. No sample moves to RUNNING: a new attempt makes a new one."""
        assert stage is not Stage.RUNNING, "count a new sample instead"
        if sample.stage is Stage.RUNNING:
            self.count(sample, -1)
        else:
            self.stages[sample.stage] -= 1
        sample.stage = stage
        self.stages[stage] += 1

    def ended(self, group: GroupState) -> None:
        """Takes one sample of the group out of those in flight."""
        self.drawn_at[group.drawn_at] -= 1
        if not self.drawn_at[group.drawn_at]:
            del self.drawn_at[group.drawn_at]

    def version_rose(self) -> None:
        overdue = [since for since in self._running_since if self._too_old(since)]
        self.overdue += sum(self._running_since.pop(since) for since in overdue)

    def leaves(self, taken: Mapping[int, int], most: int, may_leave: Callable[[int], int]) -> bool:
        """Returns whether taking these samples leaves, of those drawn at each version or before, no more than allowed.

        taken: by version of the draw; most: of them together. may_leave: how many may be left, by version of the draw.
        """
        drawn_at = sorted(self.drawn_at)
        in_flight = accumulate(self.drawn_at[version] for version in drawn_at)
        leaving = accumulate(taken.get(version, 0) for version in drawn_at)
        found = zip(drawn_at, in_flight, leaving, strict=True)
        return all(flying - min(gone, most) <= may_leave(version) for version, flying, gone in found)


# ---- what is READY, indexed ----------------------------------------------------------------------------------------


Urgency = tuple[int, int]
"""A version and the id of a group; the smallest trains first. No two groups have the same urgency."""
SPARE_ENTRIES = 64
"""Number of replaced entries that the heap of a CutQueue may hold even when it is short."""


class CutQueue:
    """Keeps for each group how many samples it offers, and how urgently. samples: what all groups offer together.

    by_version: offered samples by the version of their urgency. The heap keeps entries that were replaced until they
    come up or outnumber the others, so that a change costs the logarithm of the number of offers, amortised.

    A group has one offer, which a new one replaces. The gate calls it whenever a group changes.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.by_version = Counter[int]()
        self._offers: dict[int, tuple[Urgency, int]] = {}
        self._heap: list[Urgency] = []

    def put(self, group: int, urgency: Urgency, samples: int) -> None:
        """Replaces what this group offers."""
        known = self._offers.get(group)
        if known == (urgency, samples):
            return
        self.remove(group)
        self._offers[group] = (urgency, samples)
        self.samples += samples
        self.by_version[urgency[0]] += samples
        if known is None or known[0] != urgency:
            heapq.heappush(self._heap, urgency)
            if len(self._heap) > 2 * len(self._offers) + SPARE_ENTRIES:
                self._heap = [each for each, _ in self._offers.values()]
                heapq.heapify(self._heap)

    def remove(self, group: int) -> None:
        if (known := self._offers.pop(group, None)) is None:
            return
        (version, _), samples = known
        self.samples -= samples
        self.by_version[version] -= samples
        if not self.by_version[version]:
            del self.by_version[version]

    def most_urgent(self, samples: int) -> list[int]:
        """Returns the most urgent groups, no more than are necessary for so many samples, or all."""
        taken = dict[int, Urgency]()
        left = samples
        while left > 0 and self._heap:
            urgency = heapq.heappop(self._heap)
            group = urgency[1]
            if group not in taken and group in self._offers and self._offers[group][0] == urgency:
                taken[group] = urgency
                left -= self._offers[group][1]
        for urgency in taken.values():
            heapq.heappush(self._heap, urgency)
        return list(taken)


class StampIndex:
    """Keeps the groups that have a READY sample with each version stamp; the stamp None is kept nowhere.

    The gate calls it whenever a sample becomes READY or leaves that stage.
    """

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, None]] = {}
        self._stamps: list[int] = []

    def add(self, stamp: int | None, group: int) -> None:
        if stamp is None:
            return
        if stamp not in self._groups:
            self._groups[stamp] = {}
            heapq.heappush(self._stamps, stamp)
        self._groups[stamp][group] = None

    def discard(self, stamp: int | None, group: int) -> None:
        if stamp in self._groups:
            self._groups[stamp].pop(group, None)

    def at(self, stamp: int) -> tuple[int, ...]:
        return tuple(self._groups.get(stamp, ()))

    def take(self, is_old: Callable[[int], bool]) -> Iterator[int]:
        """Removes the stamps that are old, and yields their groups. is_old: holds for every stamp below an old one."""
        while self._stamps and is_old(self._stamps[0]):
            yield from self._groups.pop(heapq.heappop(self._stamps))


class Gate:
    """Keeps the groups in flight and applies the rules to them. Finished groups are forgotten at once.

    counts: samples by stage since this gate was made. awaited: groups without the reward of their greedy answer. The
    staleness report takes each step abandoned_tokens, sampled in attempts that were given up; ended samples; and gaps,
    the baseline at an early cut minus that of the whole group.

    A sample is in one stage, and none is picked that the policy calls too old. While a run goes on, the sample tracker
    alone changes it.
    """

    def __init__(self, config: GateConfig, version: int = 0, next_group: int = 0) -> None:
        self.config = config
        self.rule = config.rule
        self.version = version
        self.next_group = next_group
        self.abandoned_tokens = 0
        # Four times what can be in flight: when nothing is trained for that long, only the newest are reported.
        self.ended: deque[EndedSample] = deque(maxlen=4 * config.cap * config.members)
        self.gaps: deque[float] = deque(maxlen=4 * config.cap)
        self.awaited = 0
        self._groups: dict[int, GroupState] = {}
        self._counts = SampleCounts(self.too_old)
        self.counts = self._counts.stages
        self._oldest = next_group
        self._offers = CutQueue()
        self._stamps = StampIndex()
        self._unusable: dict[int, None] = {}
        self._stopped = False
        self._early: dict[int, float] = {}

    # ---- drawing -----------------------------------------------------------------------------------------

    def held(self) -> int:
        """Returns how many samples hold a credit: all in flight, except those that `mask` lets run past the limit."""
        return self.in_flight - (self._counts.overdue if self.rule.by_token else 0)

    def may_draw(self) -> bool:
        new = self.config.members
        fits = self.held() + new <= self.config.credits and self.in_flight + new <= self.config.cap * new
        return fits and not self._stopped

    def draw(self) -> int:
        """Puts the next group in flight, all members RUNNING in attempt 0, and returns its id."""
        assert self.may_draw(), "draw() is for when may_draw() says so"
        group = self.next_group
        self.next_group += 1
        samples = [SampleState(since=self.version) for _ in range(self.config.members)]
        self._add(GroupState(group, self.version, samples, awaits=self.config.greedy))
        return group

    def restore(self, drawn: GroupState) -> None:
        """Puts a group in flight as the journal of a resumed run has it; READY members keep the deadline of it."""
        assert drawn.id < self.next_group, "a restored group was drawn before"
        assert drawn.id not in self._groups, f"group {drawn.id} is in flight already"
        awaits = self.config.greedy and drawn.greedy is None
        samples = [replace(sample, since=self.version) for sample in drawn.samples]
        drawn_at = drawn.drawn_at if drawn.has(Stage.READY) else self.version
        self._add(GroupState(drawn.id, drawn_at, samples, drawn.attempt, awaits=awaits, greedy=drawn.greedy))
        for member in drawn.members(Stage.READY):
            self._stamps.add(self.expiry_stamp(samples[member]), drawn.id)
        self._reconsider(drawn.id)

    def stop_drawing(self) -> None:
        """Draws no further group. The groups in flight still train, at last in a short batch."""
        self._stopped = True

    @property
    def oldest(self) -> int:
        """Returns the id of the first group in flight, or of the next draw."""
        while self._oldest < self.next_group and self._oldest not in self._groups:
            self._oldest += 1
        return self._oldest

    def not_before(self, group: int) -> int:
        """Returns the oldest version that the engine may start a sequence of this group with."""
        return self.config.not_before(self.version, self._groups[group].drawn_at)

    # ---- a sample's way ----------------------------------------------------------------------------------

    def generated(self, group: int, member: int, attempt: int, first: int, last: int, tokens: int = 0) -> bool:
        """Moves a sample RUNNING -> SCORING. Returns False for an old attempt or a repeated answer."""
        assert first <= last, f"sample {(group, member)}: first version {first} is newer than its last {last}"
        sample = self._current(group, member, attempt, Stage.RUNNING)
        if sample is None:
            return False
        sample.first = first
        sample.last = last
        sample.tokens = tokens
        self._counts.move(sample, Stage.SCORING)
        return True

    def scored(
        self,
        group: int,
        member: int,
        attempt: int,
        reward: float | None,
        turn_rewards: tuple[float, ...] = (),
        without: str = "unscorable",
    ) -> bool:
        """Moves a sample SCORING -> READY; one without a reward is dropped as `without`. Returns as `generated`.
        turn_rewards: the reward in parts, of a sample with several turns."""
        sample = self._current(group, member, attempt, Stage.SCORING)
        if sample is None:
            return False
        sample.reward = reward
        sample.turn_rewards = turn_rewards
        self._counts.move(sample, Stage.READY)
        if reward is None:
            self.drop(group, [member], without)
        else:
            self._stamps.add(self.expiry_stamp(sample), group)
            self._reconsider(group)
        return True

    def parts_restored(self, group: int, member: int, turn_rewards: tuple[float, ...]) -> None:
        """Takes the parts of the reward of a READY sample, which a resume knows with its row only."""
        self._groups[group].samples[member].turn_rewards = turn_rewards
        self._reconsider(self._groups[group].id)

    def compared(self, group: int, attempt: int, reward: float | None) -> bool:
        """Takes the reward of a group's greedy answer; later attempts keep it. Returns False as `generated` does."""
        if not self.awaits(group) or self._groups[group].attempt != attempt:
            return False
        entry = self._groups[group]
        entry.awaits = reward is None
        entry.greedy = reward
        self.awaited -= not entry.awaits
        self._reconsider(group)
        return True

    def restart(self, group: int, members: Sequence[int]) -> int:
        """Begins a new attempt for these members in flight and returns its number."""
        entry = self._groups[group]
        entry.attempt += 1
        for member in members:
            sample = self._expect(group, member, IN_FLIGHT, "restarted")
            self.abandoned_tokens += sample.tokens
            self._counts.count(sample, -1)
            self._stamps.discard(self.expiry_stamp(sample), group)
            entry.samples[member] = SampleState(attempt=entry.attempt, since=self.version)
            self._counts.count(entry.samples[member], +1)
        for member in entry.members(Stage.READY):
            self._stamps.add(self.expiry_stamp(entry.samples[member]), group)
        self._reconsider(group)
        return entry.attempt

    def drop(self, group: int, members: Iterable[int], reason: str) -> None:
        """Moves samples RUNNING, SCORING or READY -> DROPPED. Samples in TRAINING go through `requeue` first."""
        for member in members:
            sample = self._expect(group, member, DROPPABLE, "dropped")
            sample.reason = reason
            self._end(self._groups[group], member, Stage.DROPPED)
        self._reconsider(group)

    # ---- training ----------------------------------------------------------------------------------------

    def pick(self) -> Pick:
        """Drops what cannot train, then picks what to train next and moves it to TRAINING; between iterations only."""
        assert not self.counts[Stage.TRAINING], "pick() is for when no iteration is running"
        dropped = self._drop_unusable()
        waits = not self._offers_full_batch or (self.rule.by_draw and not self.fits_deadlines())
        if not self._offers.samples or (waits and not self.exhausted):
            return Pick(None, dropped)
        cuts = self._urgent_cuts()
        for group, members in cuts:
            for member in members:
                self._counts.move(self._groups[group].samples[member], Stage.TRAINING)
            self._reconsider(group)
        open_groups = [self._groups[group] for group, _ in cuts if self._groups[group].has(*OPEN)]
        self._early = {group.id: fmean(group.rewards().values()) for group in open_groups}
        return Pick(tuple(cuts), dropped)

    def requeue(self, cuts: Iterable[Cut]) -> None:
        """Moves samples TRAINING -> READY after a failed step; those restarted or dropped meanwhile stay so."""
        for group, members in cuts:
            for member in members:
                sample = self._groups[group].samples[member] if group in self._groups else None
                if sample is not None and sample.stage is Stage.TRAINING:
                    self._counts.move(sample, Stage.READY)
                    self._stamps.add(self.expiry_stamp(sample), group)
            if group in self._groups:
                self._reconsider(group)

    def trained(self, cuts: Iterable[Cut], version: int) -> None:
        assert version >= self.version, f"the trainer went back from version {self.version} to {version}"
        for group, members in cuts:
            for member in members:
                self._expect(group, member, (Stage.TRAINING,), "trained")
                self._end(self._groups[group], member, Stage.TRAINED)
            if group in self._early:
                self._groups[group].baselines.append(self._early[group])
            self._reconsider(group)
        while self.version < version:
            self._raise_version()

    def preview(self) -> tuple[Cut, ...]:
        """Returns what `pick` would take if no iteration were running; () while that is no full batch."""
        return tuple(self._urgent_cuts()) if self._offers_full_batch else ()

    # ---- the rules ---------------------------------------------------------------------------------------

    def too_old(self, stamp: int) -> bool:
        """Returns whether tokens sampled at version `stamp` may not enter the loss any more."""
        return not live(stamp, self.version, self.config.limit)

    def expiry_stamp(self, sample: SampleState) -> int | None:
        """Returns the version stamp that must not be too old: under `mask` of the last token, so that one token is
        live, under `drop` of the first, so that all are. None: the policy drops no sample for its age."""
        return self.rule.expires(sample.first, sample.last)

    def due(self, group: GroupState) -> bool:
        """Returns whether some READY sample has its last chance: after one more version none of its tokens is live."""
        last = group.oldest_ready
        return last is not None and not live(last, self.version + 1, self.config.limit)

    def may_cut(self, group: GroupState) -> bool:
        """Returns whether the READY members of this group may train without waiting for the others."""
        if group.awaits or not group.has(*OPEN):
            return not group.awaits
        if not self.rule.by_token or not self._has_signal(group):
            return False
        enough = self.config.members if self.config.cut_at is None else self.config.cut_at
        return len(group.rewards()) >= (self.config.baseline if self.due(group) else enough)

    def usable(self, group: GroupState) -> bool:
        """Returns whether the READY members of a group can train once none is open: with a baseline and a signal."""
        return self._has_signal(group) and len(group.rewards()) >= self.config.baseline

    def _has_signal(self, group: GroupState) -> bool:
        return not self.config.need_signal or group.has_signal(self.config.turn_discount)

    def fits_deadlines(self) -> bool:
        """Returns whether, under `block`, what the most urgent cuts leave fits into the iterations before its deadline.

        For every k in 0..eta, not only 0, at most k x B x G samples may be left of those drawn at version + k - eta or
        before. Whole cuts hold at most G - 1 samples more than a batch, which decides most answers without the cuts.
        """
        most = self.config.batch + self.config.members - 1
        if not self._counts.leaves(self._offers.by_version, most, self._may_leave):
            return False
        taken = Counter[int]()
        for group, members in self._urgent_cuts():
            taken[self._groups[group].drawn_at] += len(members)
        return self._counts.leaves(taken, most, self._may_leave)

    def _may_leave(self, drawn_at: int) -> int:
        return max(0, drawn_at - self.version + self.config.limit) * self.config.batch

    # ---- looking -----------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return sum(map(self.counts.__getitem__, IN_FLIGHT))

    @property
    def offered(self) -> int:
        return self._offers.samples

    @property
    def worth_picking(self) -> bool:
        """Returns whether enough samples are ready, or no more will be. Cheap; asked at each score."""
        return self.counts[Stage.READY] >= self.config.batch or not any(self.counts[stage] for stage in OPEN)

    @property
    def exhausted(self) -> bool:
        """Returns whether no sample becomes ready by itself: none runs, is scored or awaited, and none may be drawn."""
        return not any(self.counts[stage] for stage in OPEN) and not self.awaited and not self.may_draw()

    def finished(self, group: int) -> bool:
        return group not in self._groups

    def awaits(self, group: int) -> bool:
        return group in self._groups and self._groups[group].awaits

    def group(self, group: int) -> GroupState:
        return self._groups[group]

    def members(self, group: int, *stages: Stage) -> tuple[int, ...]:
        """Returns the members of a group that are in one of these stages; () for a finished group."""
        return self._groups[group].members(*stages) if group in self._groups else ()

    def groups(self) -> tuple[int, ...]:
        return tuple(sorted(self._groups))

    def samples(self) -> Iterator[SampleState]:
        return (sample for group in self._groups.values() for sample in group.samples)

    # ---- parts -------------------------------------------------------------------------------------------

    def _add(self, group: GroupState) -> None:
        self._groups[group.id] = group
        self._oldest = min(self._oldest, group.id)
        self.awaited += group.awaits
        self._counts.add(group)

    def _raise_version(self) -> None:
        self.version += 1
        self._counts.version_rose()
        if self.rule.by_token:
            for group in self._stamps.at(self.version - self.config.limit):
                self._reconsider(group)

    def _reconsider(self, number: int) -> None:
        """Keeps the indexes up to date after a change of this group, and forgets the group with its last sample."""
        group = self._groups[number]
        ready = group.members(Stage.READY)
        if not ready and group.finished:
            self._offers.remove(number)
            self._unusable.pop(number, None)
            self._forget(number)
            return
        if may_cut := bool(ready) and self.may_cut(group):
            self._offers.put(number, self._urgency(group), len(ready))
        else:
            self._offers.remove(number)
        if may_cut and not group.has(*OPEN) and not self.usable(group):
            self._unusable[number] = None
        else:
            self._unusable.pop(number, None)

    def _current(self, group: int, member: int, attempt: int, stage: Stage) -> SampleState | None:
        sample = self._groups[group].samples[member] if group in self._groups else None
        return sample if sample is not None and (sample.attempt, sample.stage) == (attempt, stage) else None

    def _expect(self, group: int, member: int, stages: Sequence[Stage], what: str) -> SampleState:
        sample = self._groups[group].samples[member] if group in self._groups else None
        if sample is None or sample.stage not in stages:
            found = "its group has finished" if sample is None else f"it is {sample.stage.value}"
            raise IllegalTransition(f"sample {(group, member)} cannot be {what}: {found}")
        return sample

    def _end(self, group: GroupState, member: int, stage: Stage) -> None:
        sample = group.samples[member]
        self._counts.move(sample, stage)
        self._counts.ended(group)
        early = stage is Stage.TRAINED and group.id in self._early
        known = (sample.tokens, sample.first, sample.last, self.version, sample.reason, early, sample.attempt)
        self.ended.append(EndedSample(group.id, member, *known))

    def _forget(self, number: int) -> None:
        group = self._groups.pop(number)
        self.gaps.extend(baseline - fmean(group.rewards().values()) for baseline in group.baselines)
        self.awaited -= group.awaits
        for sample in group.samples:
            self._stamps.discard(self.expiry_stamp(sample), number)

    def _drop_unusable(self) -> tuple[Drop, ...]:
        """Drops what is too old, and what cannot train although no member of its group is open any more."""
        aged = sorted(group for group in dict.fromkeys(self._stamps.take(self.too_old)) if group in self._groups)
        old = self._drop_ready("stale", aged, self._is_stale)
        complete = sorted(self._unusable)
        rewards = {group: len(self._groups[group].rewards()) for group in complete}
        lacking = [group for group in complete if rewards[group] < self.config.baseline]
        equal = [group for group in complete if rewards[group] >= self.config.baseline]
        return (*old, *self._drop_ready("no_baseline", lacking), *self._drop_ready("no_signal", equal))

    def _is_stale(self, sample: SampleState) -> bool:
        stamp = self.expiry_stamp(sample)
        return stamp is not None and self.too_old(stamp)

    def _drop_ready(
        self, reason: str, groups: Iterable[int], condition: Callable[[SampleState], bool] = lambda _: True
    ) -> list[Drop]:
        drops = []
        for group in map(self._groups.__getitem__, groups):
            members = tuple(member for member in group.members(Stage.READY) if condition(group.samples[member]))
            if members:
                self.drop(group.id, members, reason)
                drops.append(Drop(group, members, reason))
        return drops

    @property
    def _offers_full_batch(self) -> bool:
        return self._offers.samples >= self.config.batch

    def _urgent_cuts(self) -> list[Cut]:
        """Returns the most urgent cuts, as many as make a full batch, or all; sorted by group."""
        groups = sorted(self._offers.most_urgent(self.config.batch))
        return [(group, self._groups[group].members(Stage.READY)) for group in groups]

    def _urgency(self, group: GroupState) -> Urgency:
        oldest = group.drawn_at if self.rule.by_draw else group.oldest_ready
        assert oldest is not None, f"group {group.id} offers no sample"
        return (oldest, group.id)
