"""The gate as the specification reads: every answer scans all groups in flight."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
from asyncrl.protocols.staleness import live


class ReferenceGate:
    """Answers what Gate answers, whose methods say what each is."""

    def __init__(self, config: GateConfig, version: int = 0, next_group: int = 0) -> None:
        self.config = config
        self.version = version
        self.next_group = next_group
        self.abandoned_tokens = 0
        # Four times what can be in flight: when nothing is trained for that long, only the newest are reported.
        self.ended: deque[EndedSample] = deque(maxlen=4 * config.cap * config.members)
        self.gaps: deque[float] = deque(maxlen=4 * config.cap)
        self._groups: dict[int, GroupState] = {}
        self.counts = Counter[Stage]()
        self._running_since = Counter[int]()
        self._stopped = False
        self._early: dict[int, float] = {}

    # ---- drawing -----------------------------------------------------------------------------------------

    def held(self) -> int:
        began = self._running_since.items() if self.config.policy == "mask" else ()
        past = sum(count for version, count in began if not live(version, self.version, self.config.limit))
        return self.in_flight - past

    def may_draw(self) -> bool:
        new = self.config.members
        fits = self.held() + new <= self.config.credits and self.in_flight + new <= self.config.cap * new
        return fits and not self._stopped

    def draw(self) -> int:
        assert self.may_draw(), "draw() is for when may_draw() says so"
        group = self.next_group
        self.next_group += 1
        samples = [SampleState(since=self.version) for _ in range(self.config.members)]
        self._add(GroupState(group, self.version, samples, awaits=self.config.greedy))
        return group

    def restore(self, drawn: GroupState) -> None:
        assert drawn.id < self.next_group, "a restored group was drawn before"
        assert drawn.id not in self._groups, f"group {drawn.id} is in flight already"
        awaits = self.config.greedy and drawn.greedy is None
        samples = [replace(sample, since=self.version) for sample in drawn.samples]
        drawn_at = drawn.drawn_at if drawn.members(Stage.READY) else self.version
        self._add(GroupState(drawn.id, drawn_at, samples, drawn.attempt, awaits=awaits, greedy=drawn.greedy))

    def stop_drawing(self) -> None:
        self._stopped = True

    @property
    def oldest(self) -> int:
        return min(self._groups, default=self.next_group)

    def not_before(self, group: int) -> int:
        if self.config.policy == "block":  # The deadline of a sample counts from its draw.
            return self._groups[group].drawn_at
        return max(0, self.version - self.config.limit)

    # ---- a sample's way ----------------------------------------------------------------------------------

    def generated(self, group: int, member: int, attempt: int, first: int, last: int, tokens: int = 0) -> bool:
        assert first <= last, f"sample {(group, member)}: first version {first} is newer than its last {last}"
        sample = self._current(group, member, attempt, Stage.RUNNING)
        if sample is None:
            return False
        sample.first = first
        sample.last = last
        sample.tokens = tokens
        self._move(sample, Stage.SCORING)
        return True

    def scored(self, group: int, member: int, attempt: int, reward: float | None) -> bool:
        sample = self._current(group, member, attempt, Stage.SCORING)
        if sample is None:
            return False
        sample.reward = reward
        self._move(sample, Stage.READY)
        if reward is None:
            self.drop(group, [member], "unscorable")
        return True

    def compared(self, group: int, attempt: int, reward: float | None) -> bool:
        if not self.awaits(group) or self._groups[group].attempt != attempt:
            return False
        self._groups[group].awaits = reward is None
        self._groups[group].greedy = reward
        return True

    def restart(self, group: int, members: Sequence[int]) -> int:
        entry = self._groups[group]
        entry.attempt += 1
        for member in members:
            sample = self._expect(group, member, IN_FLIGHT)
            self.abandoned_tokens += sample.tokens
            self._count(sample, -1)
            entry.samples[member] = SampleState(attempt=entry.attempt, since=self.version)
            self._count(entry.samples[member], +1)
        return entry.attempt

    def drop(self, group: int, members: Iterable[int], reason: str) -> None:
        for member in members:
            sample = self._expect(group, member, DROPPABLE)
            sample.reason = reason
            self._end(self._groups[group], member, Stage.DROPPED)
        self._forget(group)

    # ---- training ----------------------------------------------------------------------------------------

    def pick(self) -> Pick:
        assert not self.counts[Stage.TRAINING], "pick() is for when no iteration is running"
        dropped = self._drop_unusable()
        cuts, full = self._urgent_cuts()
        waits = not full or (self.config.policy == "block" and not self.fits_deadlines(cuts))
        if not cuts or (waits and not self.exhausted):
            return Pick(None, dropped)
        for group, members in cuts:
            for member in members:
                self._move(self._groups[group].samples[member], Stage.TRAINING)
        open_groups = [self._groups[group] for group, _ in cuts if self._groups[group].members(*OPEN)]
        self._early = {group.id: fmean(group.rewards().values()) for group in open_groups}
        return Pick(tuple(sorted(cuts)), dropped)

    def requeue(self, cuts: Iterable[Cut]) -> None:
        for group, members in cuts:
            for member in members:
                sample = self._groups[group].samples[member] if group in self._groups else None
                if sample is not None and sample.stage is Stage.TRAINING:
                    self._move(sample, Stage.READY)

    def trained(self, cuts: Iterable[Cut], version: int) -> None:
        assert version >= self.version, f"the trainer went back from version {self.version} to {version}"
        for group, members in cuts:
            for member in members:
                self._expect(group, member, (Stage.TRAINING,))
                self._end(self._groups[group], member, Stage.TRAINED)
            if group in self._early:
                self._groups[group].baselines.append(self._early[group])
            self._forget(group)
        self.version = version

    def preview(self) -> tuple[Cut, ...]:
        if self.counts[Stage.READY] < self.config.batch:
            return ()
        cuts, full = self._urgent_cuts()
        return tuple(sorted(cuts)) if full else ()

    # ---- the rules ---------------------------------------------------------------------------------------

    def due(self, group: GroupState) -> bool:
        ready = (sample for sample in group.samples if sample.stage is Stage.READY)
        return any(not live(sample.last, self.version + 1, self.config.limit) for sample in ready)

    def cuts(self) -> list[Cut]:
        ready = [group for group in self._groups.values() if group.members(Stage.READY) and self.may_cut(group)]
        return [(group.id, group.members(Stage.READY)) for group in sorted(ready, key=self._urgency)]

    def may_cut(self, group: GroupState) -> bool:
        if group.awaits or not group.members(*OPEN):
            return not group.awaits
        if self.config.policy != "mask" or (self.config.need_signal and not group.has_signal()):
            return False
        enough = self.config.members if self.config.cut_at is None else self.config.cut_at
        return len(group.rewards()) >= (self.config.baseline if self.due(group) else enough)

    def fits_deadlines(self, cuts: Sequence[Cut]) -> bool:
        taken = dict(cuts)
        left = Counter[int]()
        for group in self._groups.values():
            left[group.drawn_at] += len(group.members(*IN_FLIGHT)) - len(taken.get(group.id, ()))
        limit = self.config.limit
        batch = self.config.batch
        return all(
            sum(count for drawn_at, count in left.items() if drawn_at <= self.version + k - limit) <= k * batch
            for k in range(limit + 1)
        )

    # ---- looking -----------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return sum(self.counts[stage] for stage in IN_FLIGHT)

    @property
    def exhausted(self) -> bool:
        return not any(self.counts[stage] for stage in OPEN) and not self.awaited and not self.may_draw()

    def finished(self, group: int) -> bool:
        return group not in self._groups

    def awaits(self, group: int) -> bool:
        return group in self._groups and self._groups[group].awaits

    @property
    def awaited(self) -> int:
        return sum(group.awaits for group in self._groups.values()) if self.config.greedy else 0

    def group(self, group: int) -> GroupState:
        return self._groups[group]

    def members(self, group: int, *stages: Stage) -> tuple[int, ...]:
        return self._groups[group].members(*stages) if group in self._groups else ()

    def groups(self) -> tuple[int, ...]:
        return tuple(sorted(self._groups))

    # ---- parts -------------------------------------------------------------------------------------------

    def _add(self, group: GroupState) -> None:
        self._groups[group.id] = group
        for member in group.members(*IN_FLIGHT):
            self._count(group.samples[member], +1)

    def _count(self, sample: SampleState, change: int) -> None:
        self.counts[sample.stage] += change
        if sample.stage is Stage.RUNNING:
            self._running_since[sample.since] += change
            if not self._running_since[sample.since]:
                del self._running_since[sample.since]

    def _move(self, sample: SampleState, stage: Stage) -> None:
        self._count(sample, -1)
        sample.stage = stage
        self._count(sample, +1)

    def _current(self, group: int, member: int, attempt: int, stage: Stage) -> SampleState | None:
        sample = self._groups[group].samples[member] if group in self._groups else None
        return sample if sample is not None and (sample.attempt, sample.stage) == (attempt, stage) else None

    def _expect(self, group: int, member: int, stages: Sequence[Stage]) -> SampleState:
        sample = self._groups[group].samples[member]
        assert sample.stage in stages
        return sample

    def _end(self, group: GroupState, member: int, stage: Stage) -> None:
        sample = group.samples[member]
        self._move(sample, stage)
        early = stage is Stage.TRAINED and group.id in self._early
        known = (sample.tokens, sample.first, sample.last, self.version, sample.reason, early, sample.attempt)
        self.ended.append(EndedSample(group.id, member, *known))

    def _forget(self, group: int) -> None:
        entry = self._groups[group]
        if entry.finished:
            self.gaps.extend(baseline - fmean(entry.rewards().values()) for baseline in entry.baselines)
            del self._groups[group]

    def _drop_unusable(self) -> tuple[Drop, ...]:
        stamp = {"mask": "last", "drop": "first"}.get(self.config.policy)

        def too_old(sample: SampleState) -> bool:
            return stamp is not None and not live(getattr(sample, stamp), self.version, self.config.limit)

        old = self._drop_ready("stale", list(self._groups.values()), too_old)
        complete = [group for group in self._groups.values() if not group.members(*OPEN) and not group.awaits]
        lacking = [group for group in complete if len(group.rewards()) < self.config.baseline]
        equal = [group for group in complete if self.config.need_signal and not group.has_signal()]
        return (*old, *self._drop_ready("no_baseline", lacking), *self._drop_ready("no_signal", equal))

    def _drop_ready(
        self, reason: str, groups: Iterable[GroupState], condition: Callable[[SampleState], bool] = lambda _: True
    ) -> list[Drop]:
        drops = []
        for group in groups:
            members = tuple(member for member in group.members(Stage.READY) if condition(group.samples[member]))
            if members:
                self.drop(group.id, members, reason)
                drops.append(Drop(group, members, reason))
        return drops

    def _urgent_cuts(self) -> tuple[list[Cut], bool]:
        taken = list[Cut]()
        samples = 0
        for cut in self.cuts():
            if samples >= self.config.batch:
                break
            taken.append(cut)
            samples += len(cut[1])
        return taken, samples >= self.config.batch

    def _urgency(self, group: GroupState) -> tuple[int, int]:
        if self.config.policy == "block":
            return (group.drawn_at, group.id)
        return (min(group.samples[member].last for member in group.members(Stage.READY)), group.id)
