"""The sizes, durations and faults of a trial, and how they are drawn from one seed."""

import random
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.protocols.staleness import POLICIES
from asyncrl.simulation.fakes.generation import Lengths, constant, lognormal, stragglers
from asyncrl.simulation.resumable_run import RunShape

Kind = Literal[
    "lose",
    "repeat",
    "overtake",
    "delay",
    "cut",
    "stall",
    "kill",
    "host",
    "partition",
    "one-way",
    "leave",
    "join",
    "spot",
    "scale",
    "hang",
    "row",
    "stuck",
    "jump",
    "disk",
    "controller",
]
Shape = Literal["constant", "bimodal", "lognormal"]

BASE = "base"
"""The host of the controller, and of the workers that it starts itself, where others join."""
TOKEN_TIME = 0.1
TOKENS = 10
"""Tokens of a usual completion."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Names what goes wrong when the `at`-th message of a trial is sent.

    This very message is lost (lose), arrives twice (repeat), arrives `seconds` late and after those behind it
    (overtake), holds up all behind it (delay), or breaks its link (cut).
    stall: no message of service `target` passes for `seconds`. kill: a worker of `target` dies, `turns` turns of the
    event loop later. host: all workers on the host of a worker of `target` die; a machine that joined is back `seconds`
    later. partition: no message passes between the hosts `target` and `peer` for `seconds` ("": all others); one-way:
    none from the first to the second. leave: the machine `target` is asked to leave, and its workers have `seconds`.
    join: a machine comes for a worker of `target`. spot: one comes again and again, for `seconds`, and leaves with a
    notice of `count` seconds. scale: `count` workers of `target` are to run. hang: a worker of `target` finishes
    nothing any more, and answers as if it worked. row: a row of `target` is freed. stuck: a reader of weights does not
    answer for `seconds`. jump: the clock jumps. disk: each of the next writes takes `seconds`. controller: it dies,
    with `power` in a power cut.
    """

    kind: Kind
    at: int
    target: str = ""
    turns: int = 0
    seconds: float = 0.0
    power: bool = False
    peer: str = ""
    count: int = 0


@dataclass(frozen=True, slots=True)
class Trial(RunShape):
    """Describes a run with faults.

    generators, scorers: replicas. hosts: machines that the replicas are spread over; the trainer has one of its own.
    remote: links have heartbeats, and deaths may be noticed late. latency: mean of a message. rejected: share of the
    samples that the trainer's correction rejects. reference: whether there is a reference model. poison: groups that
    kill every worker that samples them. greedy: the algorithm is ReMax. tokens: of a usual completion. deadline: of a
    sample, in seconds in a slot. judges: calls that one reward worker scores at a time; 0: all of them. preemptions:
    how often the first host is lost, once a minute. turns: most turns of an episode; 0: samples are single answers.
    joined: generators and scorers run on machines that join, one of each service on each of `hosts`; the others are
    spares. returns: to one checkpoint, after deaths of the trainer, while the other workers stay. ranks: of the
    trainer.
    """

    generators: int = 1
    scorers: int = 1
    hosts: int = 1
    reference: bool = False
    remote: bool = False
    latency: float = 0.0
    shape: Shape = "constant"
    step_time: float = 0.5
    reward_time: float = 0.1
    rejected: float = 0.0
    poison: tuple[int, ...] = ()
    faults: tuple[Fault, ...] = ()
    max_new_tokens: int = 100
    tokens: int = TOKENS
    deadline: float = 40.0
    judges: int = 0
    preemptions: int = 0
    turns: int = 0
    joined: bool = False
    returns: int = 0
    ranks: int = 1

    @property
    def joining(self) -> tuple[str, ...]:
        """Returns the services whose workers join."""
        return ("generation", "reward") if self.joined else ()

    @property
    def all_slots(self) -> int:
        return self.slots * self.generators

    @property
    def queue_time(self) -> float:
        """Seconds until all that can be in flight has been sampled and scored in turn, if lengths are usual ones."""
        judging = 2 * self.reward_time / (self.judges * self.scorers) if self.judges else 0.0
        sampling = max(1, self.turns) * self.tokens * TOKEN_TIME / self.all_slots
        return self.gate.cap * self.members * (sampling + judging)

    @property
    def lengths(self) -> Lengths:
        match self.shape:
            case "constant":
                return constant(self.tokens)
            case "bimodal":
                return stragglers(self.tokens // 2, 0.15, 10)
            case "lognormal":
                return lognormal(self.tokens, 0.8)


def draw_trial(seed: int) -> Trial:
    chance = random.Random(f"trial {seed}")
    poison = random.Random(f"poison {seed}")
    remote = chance.random() < 0.5
    reference = chance.random() < 0.4
    members = chance.randint(2, 3)
    trial = Trial(
        seed=seed,
        policy=chance.choice(("mask", *POLICIES)),
        groups=chance.randint(1, 2),
        members=members,
        limit=chance.randint(0, 2),
        slots=chance.randint(2, 6),
        cut_at=chance.choice((None, 2)),
        steps=chance.randint(2, 4),
        generators=chance.randint(1, 2),
        scorers=chance.choice((1, 1, 2)),
        reference=reference,
        remote=remote,
        latency=chance.choice((0.0, 0.001, 0.1)),
        shape=chance.choice(("constant", "bimodal", "lognormal")),
        flip_time=chance.choice((0.0, 0.3)),
        step_time=chance.choice((0.0, 0.5, 2.0)),
        reward_time=chance.choice((0.0, 0.1, 1.0)),
        unscorable=chance.choice((0.0, 0.0, 0.2)),
        finish=chance.choice(("abandon", "abandon", "drain")),
        checkpoint_every=chance.randint(1, 2),
        poison=(poison.choice((0, 1, 2, 5)),) if poison.random() < 0.1 else (),
        faults=tuple(_fault(chance, remote, reference) for _ in range(chance.choice((0, 1, 2, 3, 4, 6)))),
    )
    # A lost release of rows is repeated only after its deadline. Groups that are dropped without a step come so fast
    # that the spare row slots would not last until then.
    loses = any(fault.kind == "lose" for fault in trial.faults)
    greedy = random.Random(f"greedy {seed}").random() < 0.2
    hosts = random.Random(f"hosts {seed}").choice((1, 1, 2))
    rejected = random.Random(f"rejected {seed}").choice((0.0, 0.0, 0.1))
    background = random.Random(f"background {seed}").random() < 0.5
    need_signal = chance.random() < 0.25 and not loses
    trial = replace(trial, need_signal=need_signal, greedy=greedy, hosts=hosts, rejected=rejected)
    return replace(trial, background_checkpoints=background)


def draw_episodes(seed: int) -> Trial:
    """Draws a trial whose samples are episodes, with two more faults, of which most meet the environment."""
    chance = random.Random(f"episodes {seed}")
    trial = draw_trial(seed)
    kinds: tuple[Kind, ...] = ("kill", "kill", "row", "hang")
    more = [
        Fault(chance.choice(kinds), int(10 ** chance.uniform(1.0, 2.8)), "environment", chance.choice((0, 1, 3, 8)))
        for _ in range(2)
    ]
    return replace(trial, turns=chance.randint(2, 4), faults=(*trial.faults, *more))


def draw_returns(seed: int) -> Trial:
    """Draws a trial in which the trainer dies again and again, while other faults meet all workers."""
    chance = random.Random(f"returns {seed}")
    trial = draw_episodes(seed) if chance.random() < 0.3 else draw_trial(seed)
    deaths = [
        Fault("kill", int(10 ** chance.uniform(1.0, 3.0)), "training", chance.choice((0, 1, 2, 3, 5, 8)))
        for _ in range(chance.randint(1, 5))
    ]
    others = tuple(fault for fault in trial.faults if fault.kind != "controller")
    return replace(trial, returns=chance.randint(1, 3), steps=chance.randint(3, 6), faults=(*others, *deaths))


def draw_lockstep(seed: int) -> Trial:
    """Draws a trial whose batches are sampled by one version and trained by the next."""
    trial = draw_trial(seed)
    return replace(trial, admission="lockstep", limit=1, steps=trial.steps + 2)


def draw_ranks(seed: int) -> Trial:
    """Draws a trial whose trainer has several ranks, of which one dies again and again; a few other faults meet all
    workers."""
    chance = random.Random(f"ranks {seed}")
    trial = draw_trial(seed)
    others = tuple(fault for fault in trial.faults if fault.kind != "controller")[: chance.choice((0, 0, 1, 2))]
    deaths = tuple(
        Fault("kill", int(10 ** chance.uniform(1.8, 3.2)), "training", chance.choice((0, 1, 2, 3, 5, 8)))
        for _ in range(chance.randint(2, 6))
    )
    return replace(
        trial,
        returns=chance.randint(1, 6),
        ranks=chance.randint(2, 3),
        steps=chance.randint(6, 12),
        step_time=chance.choice((0.5, 1.0, 2.0)),
        checkpoint_every=chance.choice((1, 3, 100)),
        faults=(*others, *deaths),
    )


MEMBERSHIP: tuple[Kind, ...] = ("partition", "one-way", "leave", "join", "spot", "scale", "host")
"""Faults of machines that joined, and of the network between them: none of them ends a run."""


ENOUGH = 120.0
"""Seconds in which every worker finishes what it has."""


def draw_joined(seed: int) -> Trial:
    """Draws a trial whose generators and scorers run on machines that join, leave, die and are cut off."""
    chance = random.Random(f"joined {seed}")
    trial = draw_trial(seed)
    hosts = chance.randint(2, 4)
    others = tuple(fault for fault in trial.faults if fault.kind not in MEMBERSHIP)[: chance.choice((0, 0, 0, 1, 2))]
    machines = tuple(_machine_fault(chance, hosts) for _ in range(chance.choice((1, 1, 2, 3, 5))))
    return replace(
        trial,
        joined=True,
        remote=True,
        groups=chance.randint(1, 3),
        hosts=hosts,
        generators=chance.randint(1, min(3, hosts)),
        scorers=chance.randint(1, 2),
        steps=chance.randint(4, 10),
        tokens=chance.choice((TOKENS, TOKENS, 5 * TOKENS)),
        step_time=chance.choice((0.5, 2.0, 8.0)),
        need_signal=False,
        faults=(*others, *machines),
    )


def draw_joined_returns(seed: int) -> Trial:
    """Draws a trial of `draw_joined` in which ranks of the trainer, which joined nobody, die too."""
    chance = random.Random(f"joined returns {seed}")
    trial = draw_joined(seed)
    deaths = tuple(
        Fault("kill", int(10 ** chance.uniform(2.0, 3.2)), "training", chance.choice((0, 1, 2, 3, 5, 8)))
        for _ in range(chance.randint(1, 4))
    )
    returns = chance.randint(1, 4)
    ranks = chance.randint(1, 2)
    return replace(trial, returns=returns, ranks=ranks, faults=(*trial.faults, *deaths))


def _machine_fault(chance: random.Random, hosts: int) -> Fault:
    kind = chance.choice(MEMBERSHIP)
    at = int(10 ** chance.uniform(1.5, 3.2))
    host = f"host{chance.randrange(hosts)}"
    service = chance.choice(("generation", "generation", "reward"))
    seconds = chance.choice((1.0, 10.0, 60.0))
    match kind:
        case "partition" | "one-way":
            ends = [host, chance.choice(("", BASE, BASE, f"host{chance.randrange(hosts)}"))]
            chance.shuffle(ends)
            return Fault(kind, at, ends[0], seconds=seconds, peer=ends[1])
        case "leave":
            return Fault(kind, at, host, seconds=chance.choice((0.0, 2.0, 20.0, ENOUGH)))
        case "spot":
            return Fault(kind, at, service, seconds=seconds, count=chance.choice((0, 0, 5)))
        case "scale":
            return Fault(kind, at, service, count=chance.randint(1, hosts))
        case _:
            return Fault(kind, at, service, chance.choice((0, 1, 2, 3, 5, 8)), seconds=seconds)


DEATHS: tuple[Kind, ...] = ("cut", "kill", "kill", "kill", "host", "host", "controller")
LOCAL: tuple[Kind, ...] = (*DEATHS, "hang", "row", "stuck", "stall", "jump", "disk", "delay")
REMOTE: tuple[Kind, ...] = (*LOCAL, "lose", "lose", "repeat", "repeat", "overtake", "overtake")
"""Only messages between hosts are lost silently: the kernel loses none on one host."""


def _fault(chance: random.Random, remote: bool, reference: bool) -> Fault:
    kind = chance.choice(REMOTE if remote else LOCAL)
    at = int(10 ** chance.uniform(0.5, 2.6))
    services = ("generation", "generation", "reward", "training", *(("reference",) if reference else ()))
    match kind:
        case "host":
            return Fault(kind, at, chance.choice(("generation", "reward")), chance.choice((0, 1, 2, 3, 5, 8)))
        case "kill" | "stall":
            target = chance.choice(services)
            seconds = chance.choice((0.5, 5.0, 30.0)) if kind == "stall" else 0.0
            return Fault(kind, at, target, chance.choice((0, 1, 2, 3, 5, 8)), seconds)
        case "row":
            return Fault(kind, at, chance.choice(("generation", *(("reference",) if reference else ()))))
        case "hang":
            return Fault(kind, at, chance.choice(("generation", "reward", *(("reference",) if reference else ()))))
        case "stuck":
            return Fault(kind, at, seconds=chance.choice((0.5, 5.0, 20.0, 60.0)))
        case "jump":
            return Fault(kind, at, seconds=chance.choice((1.0, 20.0, 1000.0)))
        case "controller":
            return Fault(kind, at, turns=chance.choice((0, 1, 2, 3, 5, 8)), power=chance.random() < 0.5)
        case "disk":
            return Fault(kind, at, seconds=chance.choice((0.01, 0.2, 2.0)))
        case _:
            return Fault(kind, at, seconds=chance.choice((0.05, 0.5, 5.0, 20.0)))
