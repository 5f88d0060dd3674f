"""Injects the faults of a trial, each when its message is sent, and says how long things may take because of them."""

import asyncio
import random
from functools import partial
from hashlib import sha256
from typing import Protocol, cast

from asyncrl.config.schema import FleetConfig
from asyncrl.fleet.remote_worker import DEATH_NOTICE
from asyncrl.fleet.service_calls import GROUP_MARGIN
from asyncrl.simulation.fakes.fake_service import now
from asyncrl.simulation.faults.slow_disk import SlowDisk
from asyncrl.simulation.faults.trial_plan import Fault, Trial
from asyncrl.simulation.faults.trial_services import GroundTruth
from asyncrl.simulation.virtual_loop import VirtualLoop

MESSAGE_FAULTS = ("lose", "repeat", "overtake", "delay", "cut")
FLEET = FleetConfig(call_deadline=60.0, start_deadline=30.0, watchdog=1e9)
CHECK_PERIOD = 5.0
"""Seconds between two checks of what may have been waiting too long."""
BROKEN_LINK_DEADLINE = 45.0
"""Seconds until a link that lost or repeated a message is ended: a start deadline, some heartbeats, and the end of a
process that ignores a stop. It holds only while no clock skips and no link stalls."""
AGE_LIMIT = 120.0
AGE_LIMIT_PER_FAULT = 100.0
"""Seconds that a group may be in flight without faults, and in addition for each injected fault: a deadline, a restart
and the wait for the next step."""


class Life(Protocol):
    """A controller with its workers, its hosts and its disk, which faults strike. over: it was killed or has ended."""

    disk: SlowDisk
    over: bool

    def runs(self, instance: str) -> bool: ...

    def kill_one(self, service: str) -> None: ...

    def change_hosts(self, fault: Fault) -> None: ...

    def kill(self, *, power_cut: bool) -> None: ...


class FaultInjection:
    """Counts the messages of a trial, on all its wires, and injects each fault at its message.

    life: the controller that runs now, with its workers and its disk. sent: number of messages so far. injected: faults
    so far. digest: hash of every message with its time. skipped: seconds that the clock jumped.
    """

    life: Life

    def __init__(self, trial: Trial, truth: GroundTruth) -> None:
        self.sent = 0
        self.injected: list[Fault] = []
        self.digest = sha256()
        self.skipped = 0.0
        self._trial = trial
        self._truth = truth
        self.loop = cast(VirtualLoop, asyncio.get_running_loop())
        self._chance = random.Random(f"messages {trial.seed}")
        self._faults: dict[int, list[Fault]] = {}
        for fault in trial.faults:
            self._faults.setdefault(fault.at, []).append(fault)
        self._stalled: dict[str, float] = {}

    def fault_of_message(self, address: str, size: int) -> Fault | None:
        """Counts a message that is sent; returns the fault that this very message meets, if there is one. Of several
        that could meet it, the last one does, and the others are not injected."""
        self.sent += 1
        self.digest.update(f"{now()!r} {address} {size}\n".encode())
        met = None
        for fault in self._faults.pop(self.sent, ()):
            if fault.kind in MESSAGE_FAULTS:
                met = fault
            else:
                self.injected.append(fault)
                self.loop.after_turns(fault.turns, partial(self._inject, fault, self.life))
        if met is not None:
            self.injected.append(met)
            if met.kind in ("lose", "repeat"):
                self._expect_end(address)
        return met

    def latency(self, address: str) -> float:
        """Returns the seconds that a message to or from this worker takes now."""
        seconds = self._chance.expovariate(1 / self._trial.latency) if self._trial.latency else 0.0
        for service, until in self._stalled.items():
            if f"//{service}" in address:
                seconds = max(seconds, until - now())
        return seconds

    def hides_hang_up(self) -> bool:
        """Returns whether the peer does not learn that a link broke, because the whole host is gone."""
        return self._trial.remote and not self._trial.joined and self._chance.random() < 0.5

    def _expect_end(self, address: str) -> None:
        """Expects that the link to a worker, and the worker, end after a message was lost or came twice. A broken link
        between two workers ends too, but nothing checks that."""
        instance, _, lane = address.removeprefix("inproc://").rpartition(".")
        if lane != "data" and instance:
            self.loop.call_later(BROKEN_LINK_DEADLINE, self._check_ended, instance, self.life, self.skipped)

    def _check_ended(self, instance: str, life: Life, skipped: float) -> None:
        stalled = any(fault.kind in ("stall", "partition", "one-way") for fault in self.injected)
        timely = skipped == self.skipped and not stalled
        if timely and life is self.life and not life.over and life.runs(instance):
            self._truth.report(
                f"{instance} still runs {BROKEN_LINK_DEADLINE:g} s after a message to or from it was lost or came twice"
            )

    def begin(self, life: Life) -> None:
        """Injects faults into this life from now on. All stalls end: it has other workers and another wire."""
        self.life = life
        self._stalled.clear()

    def _inject(self, fault: Fault, life: Life) -> None:
        if life is not self.life or life.over:
            return
        match fault.kind:
            case "kill":
                life.kill_one(fault.target)
            case "host" | "partition" | "one-way" | "leave" | "spot" | "join" | "scale":
                life.change_hosts(fault)
            case "controller":
                life.kill(power_cut=fault.power)
            case "stall":
                self._stalled[fault.target] = now() + fault.seconds
            case "row":
                self._truth.lose_row(fault.target)
            case "hang":
                self._truth.hang(fault.target)
            case "stuck":
                self._truth.stuck_seconds = fault.seconds
            case "jump":
                self.skip(fault.seconds)
            case "disk":
                life.disk.slow_down(fault.seconds)

    def now(self) -> float:
        """Returns loop time without what the clock skipped."""
        return self.loop.time() - self.skipped

    def skip(self, seconds: float) -> None:
        self.skipped += seconds
        self.loop.skip(seconds)

    def age_limit(self) -> float:
        per_fault = AGE_LIMIT_PER_FAULT * len(self.injected) + sum(fault.seconds for fault in self.injected)
        return max(AGE_LIMIT, 2 * self._trial.queue_time) + per_fault

    def call_limit(self, method: str) -> float:
        """Returns the seconds that a worker with a call may answer nothing now, by the clock that jumps. A step in
        lockstep waits for groups."""
        if method == "step" and self._trial.admission == "lockstep":
            return self.age_limit() + self.skipped
        deadline = max(FLEET.call_deadline, self._trial.deadline + GROUP_MARGIN)
        return deadline + 2 * DEATH_NOTICE + CHECK_PERIOD + self.skipped
