"""The base of services that run code of the user in a pool: of children, or of threads of this process."""

from collections.abc import Sequence
from typing import Protocol

from asyncrl.children.containment import Containment, containment_of
from asyncrl.fleet.worker.service import Service


class Pool(Protocol):
    """Runs the user's code. queued: calls that wait. finished: results so far."""

    @property
    def queued(self) -> int: ...

    @property
    def finished(self) -> int: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class PooledService(Service):
    """Starts and ends its pool, which a subclass sets, and counts what it does."""

    _pool: Pool

    def containment(self, named: Sequence[str]) -> Containment | None:
        """Returns what children with code of the user do without; None where the config contains nothing. named: names
        and commands of that code, whose files the children see."""
        facts = self.context.facts
        sockets = self.context.spec.addresses.control.removeprefix("ipc://").rpartition("/")[0]
        hidden = [*facts.secret_paths, *([sockets] if sockets.startswith("/") else [])]
        return containment_of(self.context.config, named, hidden, facts.run_dir)

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
