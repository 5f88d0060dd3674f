"""Services without torch that stand in for real ones in tests of the runtime; worker processes import this module."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.deploy.process.fork_client import Forks, worker_environment
from asyncrl.errors import ConfigError
from asyncrl.fleet.worker.service import Service
from asyncrl.protocols.batch import Batch, BatchRef, Place, RowRef
from asyncrl.protocols.distribute_collect import DP_PROTO, ONE_OF, ONE_TO_ALL
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.service_contracts import Contract, Idempotent, Lane, Training, endpoint


class Echo(Contract):
    """What the stand-in answers to."""

    @endpoint(ONE_OF, idempotent=Idempotent.PURE)
    async def echo(self, text: str) -> str:
        raise NotImplementedError

    @endpoint(ONE_OF)
    async def wait(self) -> None:
        """Never answers."""
        raise NotImplementedError

    @endpoint(ONE_OF)
    async def compute(self, seconds: float) -> str:
        """Keeps the compute thread for a while; answers with its name."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL)
    async def pids(self) -> list[int]:
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL)
    async def dice(self) -> list[list[float]]:
        """The first random numbers of Python and of numpy."""
        raise NotImplementedError

    @endpoint(ONE_OF)
    async def fail(self) -> None:
        raise NotImplementedError

    @endpoint(ONE_OF, stream=True)
    def count(self, group: PromptGroup) -> AsyncIterator[int]:
        """Numbers from 0 on, for ever."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL)
    async def closed(self) -> list[int]:
        """How many streams were closed."""
        raise NotImplementedError

    @endpoint(ONE_OF)
    async def make_rows(self, values: list[int]) -> BatchRef:
        raise NotImplementedError

    @endpoint(DP_PROTO)
    async def sum_rows(self, refs: BatchRef) -> list[int]:
        raise NotImplementedError


class EchoService(Service, Echo):
    def _begin_rows(self) -> None:
        self.rows = self.context.open_rows(8, 128)
        self.streams_closed = 0

    async def start(self) -> None:
        if message := self.context.spec.options.get("refuses"):
            raise ConfigError(message)
        if self.context.spec.options.get("dies") or self._first_at(self.context.spec.options.get("dies_unless")):
            os._exit(7)
        if self._first_at(self.context.spec.options.get("breaks_unless"), replica=1):
            raise RuntimeError("CUDA out of memory")
        self._begin_rows()

    def _first_at(self, path: str | None, replica: int = 0) -> bool:
        """Whether nobody was at this path before, if one is given; from now on somebody was."""
        if path is None or self.context.spec.replica != replica:
            return False
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            return True
        return False

    async def echo(self, text: str) -> str:
        return f"{text} from {self.context.spec.instance}"

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def compute(self, seconds: float) -> str:
        def work() -> str:
            time.sleep(seconds)
            return "done"

        return await self.context.compute.run(work)

    async def pids(self) -> list[int]:
        return [os.getpid()]

    async def dice(self) -> list[list[float]]:
        return [[random.random(), float(np.random.random())]]

    async def fail(self) -> None:
        raise KeyError("nothing under that name")

    async def count(self, group: PromptGroup) -> AsyncIterator[int]:
        number = 0
        try:
            while True:
                yield number
                number += 1
        finally:
            self.streams_closed += 1

    async def closed(self) -> list[int]:
        return [self.streams_closed]

    async def make_rows(self, values: list[int]) -> BatchRef:
        assert self.rows is not None
        places = [self.keep((0, at, 0), {"number": np.array([value], np.int64)}) for at, value in enumerate(values)]
        return BatchRef(tuple(row_ref(number, place) for number, place in enumerate(places)))

    async def sum_rows(self, refs: BatchRef) -> list[int]:
        batch: Batch = await self.context.reader.read(refs, ["number"])
        return [int(row.sum()) for row in batch["number"]]


def row_ref(member: int, place: Place) -> RowRef:
    return RowRef(0, member, 0, 0, 1, 1, 0, 0, "stop", (place,))


class Trainer(Training):
    """A trainer's contract with two more endpoints, to find its process, and to have it raise an error."""

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL)
    async def pids(self) -> list[int]:
        raise NotImplementedError

    @endpoint(ONE_TO_ALL)
    async def fail(self) -> None:
        raise NotImplementedError


class TrainerService(Service, Trainer):
    async def pids(self) -> list[int]:
        return [os.getpid()]

    async def fail(self) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error")


@contextmanager
def forks_without_torch(config: Config, say: Callable[[str], None] = print, *modules: str) -> Iterator[Forks | None]:
    """Starts the processes that workers are forked from, like `forks_of`, with other modules than torch."""
    if config.fleet.start == "spawn":
        yield None
        return
    with Forks(
        worker_environment(os.environ, config.fleet.threads, config.fleet.wire),
        modules,
        config.fleet.start_deadline,
        say,
    ) as forks:
        yield forks
