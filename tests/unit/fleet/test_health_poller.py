"""The health poller on virtual time: one call to a worker at a time, and no long wait for a silent one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from asyncrl.errors import DeadlineExceeded
from asyncrl.fleet.health_poller import HEALTH_TIMEOUT, HealthPoller
from asyncrl.fleet.replicas import Replicas
from asyncrl.protocols.contracts import Lane
from asyncrl.protocols.layout import Layout
from asyncrl.protocols.messages import Health
from asyncrl.simulation import virtual_loop

DEADLINE = 10.0


class Instance:
    """Answers health after `slow` seconds, and counts the calls that are outstanding."""

    def __init__(self, service: str, slow: float = 0.01) -> None:
        self.service = service
        self.slow = slow
        self.lost = asyncio.Event()
        self.outstanding = 0
        self.most_outstanding = 0

    async def call(self, method: str, args: tuple[Any, ...], deadline: float) -> Any:
        self.outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        try:
            await asyncio.sleep(min(self.slow, deadline))
        finally:
            self.outstanding -= 1
        if self.slow > deadline:
            raise DeadlineExceeded(f"no {method}")
        return [Health(self.service, 0, 0, f"{self.service}-0", (), 0, {}, 1.0)]

    def stream(self, method: str, args: tuple[Any, ...], deadline: float) -> AsyncIterator[Any]:
        raise NotImplementedError


def polling(script: Callable[[HealthPoller, dict[str, Instance]], Awaitable[None]]) -> None:
    async def main() -> None:
        workers = {name: Replicas(name, 1, Layout()) for name in ("generation", "reward")}
        instances = {name: Instance(name) for name in workers}
        for name, instance in instances.items():
            workers[name].worker(0, 0).connected(f"{name}-0", dict.fromkeys(Lane, instance))
        async with asyncio.TaskGroup() as tasks:
            poller = HealthPoller(workers, DEADLINE, tasks)
            await script(poller, instances)
            poller.close()

    virtual_loop.run(main())


def services(answers: list[Health]) -> list[str]:
    return [health.service for health in answers]


def test_a_silent_worker_delays_the_metrics_lines_but_a_little_and_is_asked_again() -> None:
    async def script(poller: HealthPoller, instances: dict[str, Instance]) -> None:
        loop, waited, complete = asyncio.get_running_loop(), 0.0, 0
        instances["reward"].slow = 1000.0
        while loop.time() < 120:
            if loop.time() > 100:
                instances["reward"].slow = 0.01
            began = loop.time()
            answered = services(await poller.poll())
            assert "generation" in answered
            waited += loop.time() - began
            complete += len(answered) == 2
            await asyncio.sleep(0.2)
        assert waited <= 120 * 0.25
        assert complete >= 40

    polling(script)


def test_callers_share_one_call_to_a_worker() -> None:
    async def script(poller: HealthPoller, instances: dict[str, Instance]) -> None:
        instances["reward"].slow = 1.0
        poller.request()
        answers = await asyncio.gather(poller.poll(), poller.poll())
        assert [services(each) for each in answers] == [["generation", "reward"]] * 2
        assert instances["reward"].most_outstanding == 1

    polling(script)


def test_the_newest_answer_is_kept_and_an_old_one_is_not_returned_as_new() -> None:
    async def script(poller: HealthPoller, instances: dict[str, Instance]) -> None:
        await poller.poll()
        answered_at = poller.newest["reward0.0"].received_at
        instances["reward"].slow = 1000.0
        await asyncio.sleep(5)
        assert services(await poller.poll()) == ["generation"]
        assert asyncio.get_running_loop().time() == 5 + 0.01 + HEALTH_TIMEOUT
        assert poller.newest["reward0.0"].received_at == answered_at

    polling(script)
