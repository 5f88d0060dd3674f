"""The faults of chaos, drawn from a seed: what happens, where, to whom, and for how long.

The same seed draws the same faults. One is passed over when a fault of its family is under way at the same host.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

HOSTS = (1, 2, 3)
"""The controller and its trainer are on host 1, the workers that joined on the others."""
JOINED = (2, 3)
BOOTED = (2,)
"""The host of workers that is lost alone, and whose agents are killed. The other one stays for longer than an agent
waits for a controller."""

GENERATION, REWARD, TRAINING, CONTROLLER, AGENT, CHILD = (
    *("generation", "reward", "training", "controller", "agent", "child"),
)
"""Processes that can be killed or stopped. agent: the `asyncrl join` of a worker. child: runs reward functions."""

Seconds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault. family: what it takes hold of. weight: how often it is drawn. hosts: where it may happen; empty:
    everywhere at once. seconds: the shortest and longest time until it ends. roles: each is one set of victims.
    is_outage: nothing can be trained meanwhile, so that no other fault begins until a step is trained again."""

    name: str
    family: str
    weight: float
    hosts: tuple[int, ...] = JOINED
    seconds: Seconds = (0.0, 0.0)
    roles: tuple[tuple[str, ...], ...] = ((),)
    is_outage: bool = False


KINDS = (
    Kind("partition of a host, 1 s", "network", 4, HOSTS, (1, 1)),
    Kind("partition of a host of workers, 10 s", "network", 2, JOINED, (10, 10)),
    Kind("partition of a host of workers, 60 s", "network", 0.6, JOINED, (60, 60)),
    Kind("partition of the controller, 10 s", "network", 0.4, (1,), (10, 10), is_outage=True),
    Kind("partition of the controller, 60 s", "network", 0.1, (1,), (60, 60), is_outage=True),
    Kind("loss in one direction at a host of workers", "network", 2, JOINED, (3, 8)),
    Kind("loss in one direction at the controller", "network", 0.5, (1,), (3, 8), is_outage=True),
    Kind("10 % of packets lost", "network", 2, HOSTS, (5, 15)),
    Kind("10 Mbit/s", "network", 2, HOSTS, (5, 15)),
    Kind("SIGSTOP of a worker or agent", "stop", 4, JOINED, (1, 12), ((GENERATION,), (REWARD,), (AGENT,))),
    Kind("SIGSTOP of trainer or controller", "stop", 1, (1,), (1, 12), ((TRAINING,), (CONTROLLER,)), is_outage=True),
    Kind("disk of the run full", "disk", 0.6, (1,), (2, 5), is_outage=True),
    Kind("cache of a host full", "disk", 2, JOINED, (3, 10)),
    Kind("/dev/shm full", "memory", 2, HOSTS, (3, 10)),
    Kind("step of the wall clock", "clock", 3, HOSTS),
    Kind("kill -9 of a generation worker", "kill", 4, JOINED, roles=((GENERATION,),)),
    Kind("kill -9 of a reward worker", "kill", 3, JOINED, roles=((REWARD,),)),
    Kind("kill -9 of a process that runs rewards", "kill", 2, JOINED, roles=((CHILD,),)),
    Kind("kill -9 of an agent (asyncrl join)", "kill", 2, BOOTED, roles=((AGENT,),)),
    Kind("kill -9 of two workers at once", "kill", 3, JOINED, roles=((GENERATION, GENERATION), (GENERATION, REWARD))),
    Kind("kill -9 of the trainer", "kill", 0.7, (1,), roles=((TRAINING,),), is_outage=True),
    Kind("kill -9 of the controller", "kill", 0.7, (1,), roles=((CONTROLLER,),), is_outage=True),
    Kind("loss of a host of workers", "host", 3, BOOTED, (0.5, 4)),
    Kind("loss of the host of the controller", "host", 0.5, (1,), (0.5, 2), is_outage=True),
    Kind("loss of everything", "host", 0.1, (), (0.5, 2), is_outage=True),
)
"""A lost host is unplugged and all its processes are killed; it boots again when the fault ends."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One drawn fault. hosts: where. chance: chooses among several victims. amount: of a step of the clock, in seconds.
    pause: seconds until the next fault is drawn."""

    kind: Kind
    hosts: tuple[int, ...]
    roles: tuple[str, ...]
    seconds: float
    chance: float
    amount: int
    pause: float

    @property
    def holds(self) -> set[str]:
        """Returns what no other fault may take hold of meanwhile."""
        families = ("host", "network") if self.kind.family == "host" else (self.kind.family,)
        return {f"{family}{host}" for family in families for host in self.hosts}

    def __str__(self) -> str:
        where = ", ".join(f"h{host}" for host in self.hosts)
        what = f" ({' and '.join(self.roles)})" if self.roles else ""
        return f"{self.kind.name}{what} on {where}" + (f" for {self.seconds:.1f} s" if self.seconds else "")


def draw(seed: int, longest_pause: float, kinds: tuple[Kind, ...] = KINDS) -> Iterator[Fault]:
    """Yields faults without an end."""
    chance = random.Random(seed)
    weights = [kind.weight for kind in kinds]
    while True:
        (kind,) = chance.choices(kinds, weights)
        yield Fault(
            kind,
            (chance.choice(kind.hosts),) if kind.hosts else HOSTS,
            chance.choice(kind.roles),
            chance.uniform(*kind.seconds),
            chance.random(),
            chance.choice((-1, 1)) * chance.randint(1, 7200),
            chance.uniform(0.5, longest_pause),
        )
