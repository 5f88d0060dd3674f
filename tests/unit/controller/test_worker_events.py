"""A run tells those workers of a lost one that would wait for its rows."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.controller.training_run import WorkerEvents
from asyncrl.fleet.lifecycle_events import FleetEvent, WorkerCleanedUp, WorkerLost


class Reader:
    """A trainer or critic. lost: what it learned of."""

    def __init__(self) -> None:
        self.lost: list[str] = []

    async def owner_lost(self, instance: str) -> None:
        self.lost.append(instance)


def anything(*facts: object) -> None:
    return None


class Workers(list[Any]):
    """Replicas of a service of which none lives."""

    def groups_at(self, instance: str) -> list[int]:
        return []


@pytest.mark.parametrize(("heartbeat", "learns"), [(10.0, ["generation1.0-0-aa"]), (None, [])])
async def test_trainer_and_critics_learn_of_lost_workers_on_other_hosts(
    heartbeat: float | None, learns: list[str]
) -> None:
    training = Reader()
    critic = Reader()
    subscribers: list[Callable[[FleetEvent], None]] = []
    running: Any = SimpleNamespace(
        facts=SimpleNamespace(heartbeat=heartbeat),
        fleet=SimpleNamespace(training=training, critic=critic, cost_critic=None),
        workers={"generation": Workers()},
        subscribers=subscribers,
        fault_domain_of=lambda instance: "machine",
        alive_in=lambda domain: [],
    )
    gone: list[str] = []
    controller: Any = SimpleNamespace(worker_lost=anything, worker_left=anything, host_lost=gone.append)
    events = WorkerEvents(running, controller)
    subscribers[0](WorkerLost("generation", "generation1.0-0-aa", "its host is gone"))
    for instance, host_is_gone in (("reward0.0-0-a", False), ("reward1.0-0-b", True)):
        subscribers[0](WorkerCleanedUp("reward", instance, host_is_gone))
    assert gone == ["reward1.0-0-b"]
    following = asyncio.create_task(events.follow(), name="follow")
    await asyncio.sleep(0)
    following.cancel()
    assert (training.lost, critic.lost) == (learns, learns)
