"""A world around one gate that keeps its own account of every sample."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import Cut, GroupState, Pick, SampleState, Stage

OPEN = (Stage.RUNNING, Stage.SCORING)
ENDED = (Stage.TRAINED, Stage.DROPPED)
PATIENCE = 60


@dataclass
class Fact:
    """What the world knows of a sample. since: version its attempt began at; left: tokens still to sample."""

    group: int
    member: int
    drawn_at: int
    since: int
    left: int
    attempt: int = 0
    stage: Stage = Stage.RUNNING
    first: int | None = None
    last: int = 0
    reward: float | None = None
    reason: str = ""


class World:
    """Engine, reward and trainer around one gate, with stragglers, failures, losses, late weights and resumes.

    Every answer of the gate is compared with the rules, restated here over the world's own facts.
    """

    def __init__(self, seed: int, made: type[Gate] = Gate, **fixed: object) -> None:
        self.rng = random.Random(seed)
        self.made = made
        self.losses = self.rng.choice([0.0, 0.0, 0.15])
        self.stragglers = self.rng.choice([0.1, 0.1, 0.3])
        self.newest_first = self.rng.random() < 0.3
        self.chaos = self.rng.choice([0.0, 0.0, 0.08])
        self.chance = random.Random(f"greedy {seed}")
        self.config = replace(self.draw_config(), greedy=self.chance.random() < 0.25, **fixed)  # type: ignore[arg-type]
        self.greedy: dict[int, float | None] = {}
        self.attempts: dict[int, int] = {}
        self.gate = made(self.config)
        self.engine = 0
        self.facts: dict[tuple[int, int], Fact] = {}
        self.flying: dict[tuple[int, int], Fact] = {}
        self.training: tuple[Cut, ...] = ()
        self.trained: set[tuple[int, int]] = set()
        self.steps = self.rng.randint(2, 6)

    def draw_config(self) -> GateConfig:
        rng = self.rng
        members = self.rng.randint(2, 5)
        return GateConfig(
            groups=rng.randint(1, 4),
            members=members,
            limit=rng.randint(0, 3),
            policy=rng.choice(["mask", "mask", "mask", "drop", "block", "admit"]),
            slots=rng.randint(1, 40),
            cut_at=rng.choice([None, rng.randint(2, members), 2]),
            need_signal=rng.random() < 0.3,
        )

    def run(self) -> "World":
        """Until everything drawn was trained or dropped."""
        quiet = 0
        while not (self.gate.version >= self.steps and self.gate.exhausted and not self.gate.in_flight):
            moved = self.round()
            quiet = 0 if moved else quiet + 1
            assert quiet < PATIENCE, f"nothing moves any more: {self.gate.counts}"
            self.check_account()
        assert self.gate.groups() == ()
        assert all(fact.stage in ENDED for fact in self.facts.values())
        return self

    def round(self) -> bool:
        if self.gate.version >= self.steps:
            self.gate.stop_drawing()
        if self.rng.random() < 0.7:
            self.engine = self.gate.version
        moved = [self.draw(), self.decode(), self.score(), self.compare(), self.train()]
        if self.rng.random() < self.chaos:
            self.rng.choice([self.fail, self.poison, self.resume])()
        if self.rng.random() < 0.3:
            self.haunt()
        return any(moved)

    # ---- the services --------------------------------------------------------------------------------

    def draw(self) -> bool:
        drew = False
        while self.rng.random() < 0.9 and self.may_draw():
            group = self.gate.draw()
            drew = True
            self.greedy[group] = None
            self.attempts[group] = 0
            for member in range(self.config.members):
                version = self.gate.version
                fact = Fact(group, member, version, version, self.length())
                self.facts[group, member] = self.flying[group, member] = fact
        assert self.gate.may_draw() == self.may_draw()
        return drew

    def length(self) -> int:
        return self.rng.randint(1, 4) * (10 if self.rng.random() < self.stragglers else 1)

    def decode(self) -> bool:
        running = self.at(Stage.RUNNING)
        for fact in sorted(running, key=lambda fact: fact.group, reverse=self.newest_first)[: self.config.slots]:
            if fact.first is None:
                if self.engine < self.gate.not_before(fact.group):
                    continue
                fact.first = self.engine
            fact.last = self.engine
            fact.left -= 1
            if fact.left == 0:
                fact.stage = Stage.SCORING
                assert self.gate.generated(fact.group, fact.member, fact.attempt, fact.first, fact.last, 1)
        return bool(running)

    def score(self) -> bool:
        moved = False
        for fact in self.at(Stage.SCORING):
            if self.rng.random() < 0.6:
                coin = self.rng.random()
                reward = float(coin < 0.3) if self.config.need_signal else coin
                fact.reward = None if self.rng.random() < self.losses else reward
                assert self.gate.scored(fact.group, fact.member, fact.attempt, fact.reward)
                fact.stage = Stage.READY if fact.reward is not None else Stage.DROPPED
                moved = True
        return moved

    def compare(self) -> bool:
        """Greedy answers get their rewards, each once and in the newest attempt."""
        found = [group for group in self.awaited() if self.chance.random() < 0.3]
        for group in found:
            assert not self.gate.compared(group, self.attempts[group] - 1, 0.5)
            self.greedy[group] = float(self.chance.random() < 0.3)
            assert self.gate.compared(group, self.attempts[group], self.greedy[group])
            assert not self.gate.compared(group, self.attempts[group], 0.5)
            assert self.gate.group(group).greedy == self.greedy[group]
        return bool(found)

    def awaited(self) -> list[int]:
        if not self.config.greedy:
            return []
        groups = dict.fromkeys(fact.group for fact in self.flying.values() if fact.stage not in ENDED)
        return [group for group in groups if self.greedy[group] is None]

    def train(self) -> bool:
        if not self.training:
            return self.pick()
        if self.rng.random() < 0.5:
            return True
        cuts = self.training
        self.training = ()
        facts = [self.facts[group, member] for group, members in cuts for member in members]
        if self.rng.random() < self.chaos:
            self.gate.requeue(cuts)
            self.put(facts, Stage.READY)
            return True
        keys = {(fact.group, fact.member) for fact in facts}
        assert not keys & self.trained, "trained twice"
        self.trained |= keys
        self.put(facts, Stage.TRAINED)
        self.gate.trained(cuts, self.gate.version + 1)
        return True

    # ---- what goes wrong -----------------------------------------------------------------------------

    def fail(self) -> None:
        """A worker dies: what it held of a group begins again."""
        if group_and_facts := self.some_of_a_group():
            group, facts = group_and_facts
            attempt = self.attempts[group] = self.gate.restart(group, [fact.member for fact in facts])
            for fact in facts:
                self.begin(fact, attempt)

    def poison(self) -> None:
        """What is left of a group is given up; rewards that were known go with it."""
        if group_and_facts := self.some_of_a_group():
            group, facts = group_and_facts
            if facts:
                self.gate.drop(group, [fact.member for fact in facts], "poison")
            self.put(facts, Stage.DROPPED, "poison")

    def some_of_a_group(self) -> tuple[int, list[Fact]] | None:
        if not (held := self.at(*OPEN, Stage.READY)):
            return None
        group = self.rng.choice(held).group
        return group, [fact for fact in held if fact.group == group and self.rng.random() < 0.7]

    def resume(self) -> None:
        """Trainer and controller die between two iterations. READY samples may be kept; the others begin again."""
        if self.training:
            return
        before = self.gate
        self.gate = self.made(self.config, self.gate.version, self.gate.next_group)
        for group in before.groups():
            facts = [self.facts[group, member] for member in range(self.config.members)]
            compared = group not in self.awaited()
            kept = [f for f in facts if f.stage is Stage.READY and compared and self.rng.random() < 0.5]
            again = [fact for fact in facts if fact.stage not in ENDED and fact not in kept]
            self.attempts[group] = attempt = max(fact.attempt for fact in facts) + bool(again)
            for fact in again:
                self.begin(fact, attempt)
            for fact in facts:
                fact.drawn_at = fact.drawn_at if kept else self.gate.version
            self.gate.restore(self.journaled(group, facts))

    def journaled(self, group: int, facts: list[Fact]) -> GroupState:
        """Returns the state of a group as a journal knows it."""
        samples = [
            SampleState(f.stage, f.attempt, first=f.first or 0, last=f.last, reward=f.reward, reason=f.reason)
            for f in facts
        ]
        return GroupState(group, facts[0].drawn_at, samples, self.attempts[group], greedy=self.greedy[group])

    def begin(self, fact: Fact, attempt: int) -> None:
        fact.attempt, fact.since, fact.left = attempt, self.gate.version, self.length()
        fact.stage = Stage.RUNNING
        fact.first = None
        fact.reward = None

    def haunt(self) -> None:
        """Answers of old attempts and answers that come twice are refused."""
        fact = self.rng.choice(list(self.facts.values()) or [Fact(0, 0, 0, 0, 0)])
        if fact.attempt > 0:
            assert not self.gate.generated(fact.group, fact.member, fact.attempt - 1, 0, 0)
            assert not self.gate.scored(fact.group, fact.member, fact.attempt - 1, 1.0)
        if fact.stage is not Stage.RUNNING:
            assert not self.gate.generated(fact.group, fact.member, fact.attempt, 0, 0)
        if fact.stage is not Stage.SCORING:
            assert not self.gate.scored(fact.group, fact.member, fact.attempt, 1.0)

    # ---- the rules, restated -------------------------------------------------------------------------

    def at(self, *stages: Stage) -> list[Fact]:
        """Samples of unfinished groups that are in one of these stages."""
        return [fact for fact in self.flying.values() if fact.stage in stages]

    def of(self, group: int, *stages: Stage) -> list[Fact]:
        facts = (self.facts[group, member] for member in range(self.config.members))
        return [fact for fact in facts if fact.stage in stages]

    def put(self, facts: Iterable[Fact], stage: Stage, reason: str = "") -> None:
        for fact in facts:
            fact.stage = stage
            fact.reason = reason

    def may_draw(self) -> bool:
        config = self.config
        version = self.gate.version
        flying = [fact for fact in self.flying.values() if fact.stage not in ENDED]
        past = [f for f in flying if f.stage is Stage.RUNNING and f.since < version - config.limit]
        held = len(flying) - (len(past) if config.policy == "mask" else 0)
        credits = (config.limit + 1) * config.groups * config.members
        extra = -(-config.slots // config.members) if config.policy == "mask" else 0
        cap = ((config.limit + 1) * config.groups + extra) * config.members
        fits = held + config.members <= credits and len(flying) + config.members <= cap
        return fits and version < self.steps

    def pick(self) -> bool:
        version = self.gate.version
        limit = self.config.limit
        policy = self.config.policy
        age = {"mask": lambda f: version - f.last, "drop": lambda f: version - f.first}.get(policy, lambda f: limit)
        old = [fact for fact in self.at(Stage.READY) if age(fact) > limit]
        counted = dict(self.gate.counts)
        preview = self.gate.preview()
        assert self.gate.counts == counted, "foreseeing changes nothing"
        pick = self.gate.pick()
        if preview and not pick.dropped and policy != "block":
            assert pick.cuts == preview
        self.put(old, Stage.DROPPED, "stale")
        lone = [fact for fact in self.at(Stage.READY) if self.complete(fact.group) and self.scored(fact.group) < 2]
        self.put(lone, Stage.DROPPED, "no_baseline")
        idle = [fact for fact in self.at(Stage.READY) if self.complete(fact.group) and self.flat(fact.group)]
        self.put(idle, Stage.DROPPED, "no_signal")
        expected = {(f.group, f.member, f.reason) for f in (*old, *lone, *idle)}
        found = {(drop.group.id, member, drop.reason) for drop in pick.dropped for member in drop.members}
        assert found == expected
        self.check_pick(pick)
        self.training = pick.cuts or ()
        for group, members in self.training:
            self.put([self.facts[group, member] for member in members], Stage.TRAINING)
        return bool(expected or self.training)

    def complete(self, group: int) -> bool:
        return not self.of(group, *OPEN) and group not in self.awaited()

    def flat(self, group: int) -> bool:
        greedy = () if self.greedy[group] is None else (self.greedy[group],)
        return self.config.need_signal and len({*self.rewards(group).values(), *greedy}) == 1

    def scored(self, group: int) -> int:
        return len(self.rewards(group))

    def rewards(self, group: int) -> dict[int, float]:
        facts = self.of(group, Stage.READY, Stage.TRAINING, Stage.TRAINED, Stage.DROPPED)
        counted = [f for f in facts if f.stage is not Stage.DROPPED or f.reason in ("stale", "no_signal")]
        return {fact.member: fact.reward for fact in counted if fact.reward is not None}

    def may_cut(self, group: int) -> bool:
        ready = self.of(group, Stage.READY)
        if not ready or group in self.awaited():
            return False
        if not self.of(group, *OPEN):
            return True
        last_chance = any(self.gate.version - fact.last >= self.config.limit for fact in ready)
        enough = 2 if last_chance else self.config.cut_at or self.config.members
        return self.config.policy == "mask" and self.scored(group) >= enough and not self.flat(group)

    def check_pick(self, pick: Pick) -> None:
        config = self.config
        version = self.gate.version
        batch = config.groups * config.members
        groups = sorted({fact.group for fact in self.at(Stage.READY)})
        possible = {group: self.of(group, Stage.READY) for group in groups if self.may_cut(group)}
        total = sum(len(facts) for facts in possible.values())
        finished = not self.at(*OPEN) and not self.awaited() and not self.may_draw()
        if pick.cuts is None:
            assert not total or config.policy == "block" or (total < batch and not finished), "it waits in vain"
            return
        assert list(pick.cuts) == sorted(pick.cuts)
        assert all(members == tuple(f.member for f in possible[group]) for group, members in pick.cuts)
        samples = sum(len(members) for _, members in pick.cuts)
        assert samples >= batch or (finished and samples == total)
        assert config.policy == "block" or self.most_urgent(pick, possible)
        assert any(samples - len(members) < batch for _, members in pick.cuts), "more than whole cuts need"
        for group, members in pick.cuts:
            assert self.gate.group(group).rewards() == self.rewards(group)
            assert config.policy == "admit" or all(self.in_bound(self.facts[group, m], version) for m in members)

    def most_urgent(self, pick: Pick, possible: dict[int, list[Fact]]) -> bool:
        order = sorted(possible, key=lambda group: (min(fact.last for fact in possible[group]), group))
        return {group for group, _ in pick.cuts or ()} == set(order[: len(pick.cuts or ())])

    def in_bound(self, fact: Fact, version: int) -> bool:
        """Some token is live; where nothing is masked, all are."""
        assert fact.first is not None
        stamp = fact.last if self.config.policy == "mask" else fact.first
        return version - stamp <= self.config.limit

    def check_account(self) -> None:
        counts = {stage: len(self.at(stage)) for stage in Stage if stage not in ENDED}
        found = self.gate.counts
        assert counts == {stage: found[stage] for stage in counts}
        assert len(self.facts) == self.gate.next_group * self.config.members
        open_groups = {fact.group for fact in self.flying.values() if fact.stage not in ENDED}
        assert set(self.gate.groups()) == open_groups, "a finished group leaves memory, another stays"
        assert not any(self.gate.finished(group) for group in sorted(open_groups))
        self.flying = {key: fact for key, fact in self.flying.items() if fact.group in open_groups}
