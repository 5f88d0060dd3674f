"""Decides, message by message, when the faults of a trial are injected."""

import random
from collections.abc import Callable
from hashlib import sha256

from asyncrl.simulation.fakes.fake_service import now
from asyncrl.simulation.faults.trial_plan import Fault, Trial

MESSAGE_FAULTS = ("lose", "repeat", "overtake", "delay", "cut")


class FaultSchedule:
    """Counts the messages of a trial and injects each fault at its message.

    inject: injects a fault that concerns more than one message. on_broken: receives the address to or from which a
    message was lost or repeated. sent: number of messages so far, on all wires of the trial.
    injected: faults so far. digest: hash of every message with its time.
    """

    def __init__(self, trial: Trial, inject: Callable[[Fault], None], on_broken: Callable[[str], None]) -> None:
        self.sent = 0
        self.injected: list[Fault] = []
        self.digest = sha256()
        self._chance = random.Random(f"messages {trial.seed}")
        self._latency = trial.latency
        self._remote = trial.remote
        self._inject = inject
        self._on_broken = on_broken
        self._faults: dict[int, list[Fault]] = {}
        for fault in trial.faults:
            self._faults.setdefault(fault.at, []).append(fault)
        self._stalled: dict[str, float] = {}

    def fault_of_message(self, address: str, size: int) -> Fault | None:
        """Counts a message that is sent; returns the fault that this very message meets, if there is one."""
        self.sent += 1
        self.digest.update(f"{now()!r} {address} {size}\n".encode())
        found = None
        for fault in self._faults.pop(self.sent, ()):
            self.injected.append(fault)
            if fault.kind in MESSAGE_FAULTS:
                found = fault
                if fault.kind in ("lose", "repeat"):
                    self._on_broken(address)
            else:
                self._inject(fault)
        return found

    def latency(self, address: str) -> float:
        """Returns the seconds that a message to or from this worker takes now."""
        seconds = self._chance.expovariate(1 / self._latency) if self._latency else 0.0
        for service, until in self._stalled.items():
            if f"//{service}" in address:
                seconds = max(seconds, until - now())
        return seconds

    def stall(self, service: str, seconds: float) -> None:
        """Holds all messages to or from the workers of a service back for so long."""
        self._stalled[service] = now() + seconds

    def end_stalls(self) -> None:
        """Ends all stalls: a resumed run has other workers and another wire."""
        self._stalled.clear()

    def hides_hang_up(self) -> bool:
        """Returns whether the peer does not learn that a link broke, because the whole host is gone."""
        return self._remote and self._chance.random() < 0.5
