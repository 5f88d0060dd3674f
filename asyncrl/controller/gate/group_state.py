"""What the gate is set to, what it keeps of groups and samples, and what it answers with."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Self

from asyncrl.config import Config
from asyncrl.errors import ConfigError

Policy = Literal["mask", "drop", "block", "admit"]

SPARE_GROUPS = 2
"""Room for rows that a worker makes after their samples were released, until it hears that their call has ended."""

Cut = tuple[int, tuple[int, ...]]
"""A group and those of its members that train together."""


def live(stamps: Any, version: int, limit: int) -> Any:
    """Whether a token sampled at version `stamps` (a number, or an array or tensor of them) may enter the loss."""
    return version - stamps <= limit


def mean(rewards: Mapping[int, float]) -> float:
    """Over members."""
    return sum(rewards.values()) / len(rewards)


def whole_cuts(cuts: Iterable[Cut], batch: int) -> list[Cut]:
    """These cuts, in order, until they make a full batch."""
    taken, samples = list[Cut](), 0
    for cut in cuts:
        if samples >= batch:
            break
        taken.append(cut)
        samples += len(cut[1])
    return taken


@dataclass(frozen=True, slots=True)
class GateConfig:
    """groups: B, prompts of one training batch; members: G, samples of one prompt; limit: eta, in versions;
    slots: sequences that all replicas together decode at one time.

    cut_at: members that must be scored before a part of a group may train (None: only whole groups).
    baseline: fewest rewards of a group from which advantages can be computed; 1 without a group baseline.
    need_signal: groups whose rewards are all equal are not trained. greedy: each group has a greedy answer beside its
    members, and waits for the reward of that.
    Raises ConfigError for values that cannot work together.
    """

    groups: int
    members: int
    limit: int
    policy: Policy
    slots: int
    cut_at: int | None = None
    baseline: int = 2
    need_signal: bool = False
    greedy: bool = False

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError(
                f"staleness.limit = {self.limit}: a token cannot be newer than its trainer; write 0 or more"
            )
        if self.groups < 1 or self.slots < 1:
            raise ConfigError("task.prompts_per_step and generation.slots must be at least 1")
        if self.members < self.baseline:
            raise ConfigError(
                f"task.samples_per_prompt = {self.members}: the baseline is a mean over the group; "
                f"write {self.baseline} or more"
            )
        if self.cut_at is not None and self.cut_at < self.baseline:
            raise ConfigError(
                f"staleness.cut_at = {self.cut_at}: a part of a group needs {self.baseline} rewards for its baseline; "
                f'write {self.baseline} or more, or "never"'
            )

    @classmethod
    def of(cls, config: Config) -> Self:
        """The gate of an experiment; `staleness.cut_at` defaults to max(2, G // 2)."""
        members, cut_at = config.task.samples_per_prompt, config.staleness.cut_at
        return cls(
            groups=config.task.prompts_per_step,
            members=members,
            limit=config.staleness.limit,
            policy=config.staleness.policy,
            slots=config.generation.slots * config.generation.replicas,
            cut_at=None if cut_at == "never" else cut_at or min(members, max(2, members // 2)),
            baseline=1 if config.algorithm.advantage in ("batch", "gae", "greedy") else 2,
            need_signal=config.algorithm.dynamic_sampling,
            greedy=config.algorithm.advantage == "greedy",
        )

    @property
    def batch(self) -> int:
        """Samples of a full training batch, B x G."""
        return self.groups * self.members

    @property
    def credits(self) -> int:
        """Samples that may wait for training or be on their way there, (eta + 1) x B x G."""
        return (self.limit + 1) * self.batch

    @property
    def cap(self) -> int:
        """Groups in flight at one time, C. Under `mask` a straggler costs a slot and no credit, so slots add to it."""
        stragglers = -(-self.slots // self.members) if self.policy == "mask" else 0
        return (self.limit + 1) * self.groups + stragglers

    @property
    def rows(self) -> int:
        """Of one group."""
        return self.members + self.greedy

    @property
    def kept(self) -> int:
        """Rows that may lie with one worker: of all groups in flight, and of a batch that it has yet to hear is done
        with. Draws wait for the rest."""
        return (self.cap + self.groups) * self.rows

    @property
    def row_slots(self) -> int:
        """Of a worker that makes rows: all samples may lie with one replica."""
        return self.kept + SPARE_GROUPS * self.rows


class Stage(Enum):
    """Where a sample is."""

    RUNNING = "running"
    SCORING = "scoring"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"

    # Members are single objects: Enum's own hash, of the name, is a call of Python code at each look into a mapping.
    __hash__ = object.__hash__


OPEN = (Stage.RUNNING, Stage.SCORING)
DROPPABLE = (*OPEN, Stage.READY)
IN_FLIGHT = (*DROPPABLE, Stage.TRAINING)
STILL_COMPARED = ("stale", "truncated", "no_signal")
"""Reasons to drop a sample that leave its reward in the baseline of its siblings."""


@dataclass(slots=True)
class Sample:
    """since: the gate's version when its attempt began. first, last: versions of its first and last token, from the
    engine, and tokens: how many it sampled; known from SCORING on. reason: why it was dropped."""

    stage: Stage = Stage.RUNNING
    attempt: int = 0
    since: int = 0
    first: int = 0
    last: int = 0
    tokens: int = 0
    reward: float | None = None
    reason: str = ""


class Tally:
    """Samples by stage. running_since: RUNNING ones by the version at which their attempt began."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(Stage, 0)
        self.running_since: dict[int, int] = {}

    def __getitem__(self, stage: Stage) -> int:
        return self._counts[stage]

    def leave(self, sample: Sample) -> None:
        """It is about to leave its stage."""
        self._counts[sample.stage] -= 1
        if sample.stage is Stage.RUNNING:
            left = self.running_since.pop(sample.since) - 1
            if left:
                self.running_since[sample.since] = left

    def enter(self, sample: Sample, stage: Stage) -> None:
        """From here on it is in `stage`."""
        self._counts[stage] += 1
        if stage is Stage.RUNNING:
            self.running_since[sample.since] = self.running_since.get(sample.since, 0) + 1
        sample.stage = stage


@dataclass(slots=True)
class Group:
    """drawn_at: the gate's version when it was drawn. attempt: the newest of its members.

    baselines: mean rewards that its cuts were compared with, of cuts trained while members were open.
    awaits: the reward of its greedy answer, which is not known yet; greedy: that reward.
    """

    id: int
    drawn_at: int
    samples: list[Sample]
    attempt: int = 0
    baselines: list[float] = field(default_factory=list)
    awaits: bool = False
    greedy: float | None = None

    def members(self, *stages: Stage) -> tuple[int, ...]:
        return tuple(member for member, sample in enumerate(self.samples) if sample.stage in stages)

    @property
    def has_signal(self) -> bool:
        """Whether the rewards known so far differ; equal ones make every advantage 0."""
        known = {*self.rewards().values(), *(() if self.greedy is None else (self.greedy,))}
        return len(known) > 1

    def rewards(self) -> dict[int, float]:
        """Of every member in the baseline; one dropped for its age, or because all rewards were equal then, stays in
        it, an unscorable one never was."""
        return {
            member: sample.reward
            for member, sample in enumerate(self.samples)
            if sample.reward is not None and (sample.stage is not Stage.DROPPED or sample.reason in STILL_COMPARED)
        }


@dataclass(frozen=True, slots=True)
class RestoredGroup:
    """A group in flight when a run is resumed.

    attempt: the number of the attempt that begins now; running: members to sample again; trained: rewards of those
    trained before; dropped: reason and reward, if there was one, of those dropped before; greedy: reward of its greedy
    answer, if that was known.
    """

    id: int
    attempt: int
    running: tuple[int, ...]
    trained: Mapping[int, float] = field(default_factory=dict)
    dropped: Mapping[int, tuple[str, float | None]] = field(default_factory=dict)
    greedy: float | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """A sample that left without being trained."""

    group: int
    member: int
    reason: str


@dataclass(frozen=True, slots=True)
class Pick:
    """cuts: what to train now, sorted by group, members sorted; None: wait. dropped: what went out on the way.

    early: the groups among the cuts that have members still open. short: fewer samples than a full batch.
    """

    cuts: tuple[Cut, ...] | None
    dropped: tuple[Drop, ...] = ()
    early: tuple[int, ...] = ()
    short: bool = False

    @property
    def samples(self) -> int:
        return sum(len(members) for _, members in self.cuts or ())


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one sample ended. version: the gate's when its training began, or when it was dropped.

    reason: why it was dropped, "" when it was trained. early: it was in a cut of a group with open members. attempt: of
    its group; over 0, it was sampled again.
    """

    group: int
    member: int
    tokens: int
    first: int
    last: int
    version: int
    reason: str = ""
    early: bool = False
    attempt: int = 0

    @classmethod
    def of(cls, sample: Sample, group: int, member: int, version: int, early: bool) -> Self:
        tokens, first, last = sample.tokens, sample.first, sample.last
        return cls(group, member, tokens, first, last, version, sample.reason, early, sample.attempt)
