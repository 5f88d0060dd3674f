"""Numbers of the staleness gate of an experiment: batch, credits, cap, and the rows that a worker must hold."""

from dataclasses import dataclass
from typing import Literal, Self

from asyncrl.config.schema import Config
from asyncrl.protocols.staleness import POLICIES, Policy, StalenessPolicy

SPARE_GROUPS = 2
"""Groups whose rows a worker still makes after their samples were released, until it hears that the call has ended."""


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Sizes and policy of the gate. groups: B, prompts of one training batch. members: G, samples of one prompt. limit:
    eta, in versions. slots: sequences that all replicas together decode at one time. cut_at: members that must be
    scored before a part of a group may train; None: only whole groups train. baseline: fewest rewards of a group from
    which advantages can be computed. need_signal: groups whose rewards are all equal are not trained. turn_discount: of
    advantages by turn, where rewards from a turn on are compared; None: those of whole samples. greedy: each
    group waits for the reward of a greedy answer beside its members. admission: "full" draws as far ahead of the
    trainer as the limit allows, "adaptive" as far as keeps the trainer busy, "lockstep" one batch at the begin of a
    step."""

    groups: int
    members: int
    limit: int
    policy: Policy
    slots: int
    cut_at: int | None = None
    baseline: int = 2
    need_signal: bool = False
    greedy: bool = False
    admission: Literal["adaptive", "full", "lockstep"] = "full"
    turn_discount: float | None = None

    @classmethod
    def of(cls, config: Config) -> Self:
        """Returns the gate of an experiment; `staleness.cut_at` defaults to max(2, G // 2)."""
        members = config.task.samples_per_prompt
        whole = not config.staleness.rule.by_token or config.staleness.admission == "lockstep"
        cut_at = "never" if whole else config.staleness.cut_at
        return cls(
            groups=config.task.prompts_per_step,
            members=members,
            limit=config.staleness.limit,
            policy=config.staleness.policy,
            slots=config.generation.slots * config.generation_replicas,
            cut_at=None if cut_at == "never" else cut_at or min(members, max(2, members // 2)),
            baseline=1 if config.algorithm.advantage in ("batch", "gae", "greedy") else 2,
            need_signal=config.algorithm.dynamic_sampling,
            turn_discount=config.algorithm.turn_discount,
            greedy=config.algorithm.advantage == "greedy",
            admission=config.staleness.admission,
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
    def rule(self) -> StalenessPolicy:
        """Returns what follows from the policy."""
        return POLICIES[self.policy]

    @property
    def cap(self) -> int:
        """Groups in flight at one time, C."""
        return self.rule.capacity(self.limit, self.groups, -(-self.slots // self.members))

    def not_before(self, version: int, drawn_at: int) -> int:
        """Returns the oldest version that a sequence may start with whose group was drawn at another one."""
        if self.admission == "lockstep":  # The version does not rise while a sample runs.
            return version
        if self.rule.by_draw:
            return drawn_at
        return max(0, version - self.limit)

    @property
    def rows(self) -> int:
        """Rows of one group."""
        return self.members + self.greedy

    @property
    def kept(self) -> int:
        """Rows that one worker may store: of all groups in flight, and of a batch whose release it has yet to hear."""
        return (self.cap + self.groups) * self.rows

    @property
    def row_slots(self) -> int:
        """Slots of a worker that makes rows: one replica may store all samples."""
        return self.kept + SPARE_GROUPS * self.rows
