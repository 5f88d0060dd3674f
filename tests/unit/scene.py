"""A small run of the controller over simulated services."""

import asyncio
from collections.abc import Callable
from types import UnionType
from typing import Any

from asyncrl.algorithms import grpo
from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import Config
from asyncrl.controller.controller import Controller, PauseSwitch
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal import ledger
from asyncrl.controller.journal.journal import Journal, Scan
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.observers.events import Event
from asyncrl.fleet.fleet import Fleet
from asyncrl.objectives.advantages import Advantages, group_baseline
from asyncrl.simulation import virtual_loop
from asyncrl.simulation.fakes.generation import FakeGeneration, constant
from asyncrl.simulation.fakes.scoring import FakeCritic, FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from asyncrl.simulation.faults.trial_services import FakeEnvironment

CONFIG = GateConfig(groups=2, members=4, limit=1, policy="mask", slots=16, cut_at=2)


def settings(steps: int, **sections: Any) -> Config:
    """Returns the config of a small run."""
    run = {"steps": steps, "model": {"name": "none"}, "task": {"prompts": "none"}, "generation": {"max_new_tokens": 20}}
    return Config.model_validate(run | sections)


class Scene:
    """A small run; parts may be replaced before `play`."""

    def __init__(self, config: GateConfig = CONFIG, steps: int = 3) -> None:
        self.store = MemoryStore()
        self.journal, self.gate = Journal(self.store), Gate(config)
        self.generation = FakeGeneration(config.slots, 0.1, constant(20))
        self.reward: FakeReward = FakeReward(0.1)
        self.training = FakeTraining(StepCost(1.0), config.limit, [self.generation], seed=0)
        self.critic: FakeCritic | None = None
        self.cost: FakeReward | None = None
        self.cost_critic: FakeCritic | None = None
        self.environment: FakeEnvironment | None = None
        self.events: list[Event] = []
        self.observe: Callable[[Event], None] = self.events.append
        self.between: Callable[[int], Any] | None = None
        self.algorithm = grpo.ALGORITHM
        self.estimate: Advantages = group_baseline
        self.config = settings(steps)
        self.pauses = PauseSwitch()
        self.columns: dict[str, Any] = {}
        self.controller: Controller

    def play(self) -> None:
        async def nothing(version: int) -> None:
            return

        async def main() -> None:
            self.controller = Controller(
                self.gate,
                self.journal,
                Fleet(
                    self.generation,
                    self.reward,
                    self.training,
                    critic=self.critic,
                    cost=self.cost,
                    cost_critic=self.cost_critic,
                    environment=self.environment,
                ),
                lambda group: (f"prompt {group}", {"row": group, **self.columns}),
                self.config,
                self.estimate,
                between=self.between or nothing,
                observe=self.observe,
                pauses=self.pauses,
                prompt_name=lambda group: f"row {group} of the scene",
            )
            self.controller.worker_lives("generation", self.generation.instance)
            async with asyncio.timeout(10_000):
                await self.controller.run(self.algorithm)

        virtual_loop.run(main())

    async def lose_the_generator(self) -> None:
        """Kills the generator with all that it samples, and starts it again after a second."""
        instance = self.generation.instance
        self.controller.worker_lost(instance, "killed", self.generation.groups_at_work())
        self.generation.die()
        await self.training.detached(instance)
        await asyncio.sleep(1)
        self.generation.come_back()
        self.controller.worker_lives("generation", self.generation.instance)
        await self.controller.worker_started("generation")

    def told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def records(self, kind: type[ledger.Record] | UnionType) -> list[Any]:
        scan = Scan(self.store)
        return [framed.record for framed in scan if isinstance(framed.record, kind)]
