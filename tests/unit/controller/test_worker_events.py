"""A run tells those workers of a lost one that would wait for its rows."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.controller.training_run import WorkerEvents
from asyncrl.fleet.lifecycle_events import FleetEvent, WorkerLost


class Reader:
    """A trainer or critic. lost: what it learned of."""

    def __init__(self) -> None:
        self.lost: list[str] = []

    async def owner_lost(self, instance: str) -> None:
        self.lost.append(instance)


class Workers(list[Any]):
    """Replicas of a service of which none lives."""

    def groups_at(self, instance: str) -> list[int]:
        return []


@pytest.mark.parametrize(("heartbeat", "learns"), [(10.0, ["generation1.0-0-aa"]), (None, [])])
async def test_trainer_and_critics_learn_of_lost_workers_on_other_hosts(
    heartbeat: float | None, learns: list[str]
) -> None:
    training, critic = Reader(), Reader()
    subscribers: list[Callable[[FleetEvent], None]] = []
    running: Any = SimpleNamespace(
        facts=SimpleNamespace(heartbeat=heartbeat),
        fleet=SimpleNamespace(training=training, critic=critic, cost_critic=None),
        workers={"generation": Workers()},
        subscribers=subscribers,
        fault_domain_of=lambda instance: "machine",
        alive_in=lambda domain: [],
    )
    controller: Any = SimpleNamespace(worker_lost=lambda *facts: None, worker_left=lambda *facts: None)
    events = WorkerEvents(running, controller)
    subscribers[0](WorkerLost("generation", "generation1.0-0-aa", "its host is gone"))
    following = asyncio.create_task(events.follow(), name="follow")
    await asyncio.sleep(0)
    following.cancel()
    assert (training.lost, critic.lost) == (learns, learns)
