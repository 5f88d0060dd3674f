"""The base of services that run code of the user in a pool: of children, or of threads of this process."""

from typing import Generic, Protocol, TypeVar

from asyncrl.fleet.worker.service import Service


class Pool(Protocol):
    """Runs the user's code. queued: calls that wait. finished: results so far."""

    @property
    def queued(self) -> int: ...

    @property
    def finished(self) -> int: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


PoolOfCode = TypeVar("PoolOfCode", bound=Pool)


class PooledService(Service, Generic[PoolOfCode]):
    """Starts and ends its pool, which a subclass sets, and counts what it does."""

    _pool: PoolOfCode

    async def start(self) -> None:
        await self._pool.start()

    async def stop(self) -> None:
        await self._pool.stop()
        await super().stop()

    @property
    def queued(self) -> int:
        return self._pool.queued

    @property
    def finished(self) -> int:
        return super().finished + self._pool.finished
