"""Keeps workers alive: starts them, learns of a death at once, restarts, or gives the fleet up.

    start ──> link ──> `started` ──> lives ──> dead ──> outstanding calls fail ──> back-off ──> start
                                              └──> the trainer, or a sixth death without progress: FleetFailed

A worker that loads is starting, however long that takes within its deadline; only the kernel (or a broken link) says
that one is dead. Leaving `run` by cancellation stops all workers.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, Self

from asyncrl.errors import AsyncrlError, FleetFailed, PeerLost, lone
from asyncrl.launch import Launcher, WorkerProcess, WorkerSpec
from asyncrl.protocols.contracts import Lane
from asyncrl.together import together
from asyncrl.workers import DEATH_NOTICE, Channel, RemoteWorker

LIVES = 6
"""Deaths of one worker without a finished group in between that end the run: whatever kills it comes again. One more
than it takes to find the group that is to blame."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
LONG_LIFE = 60.0
"""Seconds a worker takes calls before its death is a misfortune of its own, and no step of a loop of crashes."""
STOP_STAGES = (("stop", 5.0), ("terminate", 2.0), ("kill", 2.0))
"""How a worker is ended, and seconds until the next stage; under 10 s in all."""


class Deaths:
    """Counts a worker's deaths and says what follows. Pure. Times in seconds, of any clock."""

    def __init__(self) -> None:
        self.in_a_row = self.since_progress = 0
        self._last = ""
        self._lives_since: float | None = None

    def lives(self, now: float) -> None:
        """An instance takes calls."""
        self._lives_since = now

    def count(self, instance: str, now: float) -> bool:
        """This instance is dead. False when that was known: its process and its links may both say so."""
        if instance == self._last:
            return False
        lived = 0.0 if self._lives_since is None else now - self._lives_since
        self._last, self._lives_since = instance, None
        self.in_a_row = 1 if lived >= LONG_LIFE else self.in_a_row + 1
        self.since_progress += 1
        return True

    def progressed(self) -> None:
        """A group was finished: what killed the worker before does not keep the run from going on."""
        self.since_progress = 0

    @property
    def pause(self) -> float | None:
        """Seconds to wait before the restart, doubling from FIRST_PAUSE with each short life; None: it died too often.

        Progress does not shorten it: another replica may make it while this one dies at every start.
        """
        if self.since_progress >= LIVES:
            return None
        doublings = min(self.in_a_row - 1, 10)
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**doublings)


class Connection(Protocol):
    """Links to one instance, one a lane; entering it says hello. lost: set when one of them broke, see `reason`."""

    lost: asyncio.Event

    @property
    def channels(self) -> Mapping[Lane, Channel]: ...

    @property
    def reason(self) -> str: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    def fail(self, reason: str) -> None:
        """Every outstanding call raises PeerLost now."""
        ...


@dataclass(frozen=True, slots=True)
class Post:
    """A worker to keep alive. make_spec: of its next instance. restart: whether a death of it is survived."""

    worker: RemoteWorker
    make_spec: Callable[[], WorkerSpec]
    launcher: Launcher
    restart: bool


@dataclass(frozen=True, slots=True)
class Present:
    """An instance that was started and is not buried yet."""

    spec: WorkerSpec
    process: WorkerProcess


class Observer(Protocol):
    """Told what happens to workers; must not block."""

    def changed(self, present: Mapping[str, Present]) -> None:
        """Instances were started or buried."""
        ...

    def lives(self, service: str, instance: str) -> None:
        """It takes calls from now on."""
        ...

    def lost(self, service: str, instance: str, why: str) -> None:
        """It takes no calls any more, and those it had fail now; it may still be ending, and may never have lived."""
        ...

    def gone(self, service: str, instance: str) -> None:
        """Its process was waited for: nothing of it runs any more."""
        ...


class Supervisor:
    """Runs posts. resume: the command that goes on with the run, for the error that ends it."""

    def __init__(
        self,
        posts: list[Post],
        connect: Callable[[WorkerSpec], Connection],
        observer: Observer,
        start_deadline: float,
        resume: str,
    ) -> None:
        self._posts, self._connect, self._observer = posts, connect, observer
        self._start_deadline, self._resume = start_deadline, resume
        self._deaths = {post.worker.name: Deaths() for post in posts}
        self._starting = dict.fromkeys(post.worker.name for post in posts)
        self._all_started = asyncio.Event()
        self.present: dict[str, Present] = {}

    def progressed(self) -> None:
        """A group was finished."""
        for deaths in self._deaths.values():
            deaths.progressed()

    def kill(self, instance: str) -> None:
        """End this instance, if it still runs; another one is started in its place."""
        for each in self.present.values():
            if each.spec.instance == instance:
                each.process.kill()

    async def all_started(self) -> None:
        """Returns when every worker has lived once; each has its own start deadline."""
        await self._all_started.wait()

    async def run(self) -> None:
        """Keep all workers until cancelled, then stop them.

        Raises:
            FleetFailed: the trainer died, or another worker too often.
            AsyncrlError: what a worker raised while it started for the first time.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for post in self._posts:
                    tasks.create_task(self._keep(post), name=f"keep {post.worker.name}")
        except BaseExceptionGroup as errors:
            raise lone(errors) from None

    async def _keep(self, post: Post) -> None:
        deaths = self._deaths[post.worker.name]
        while True:
            why = await self._live(post)
            if not post.restart or deaths.pause is None:
                raise FleetFailed(self._verdict(post, why))
            await asyncio.sleep(deaths.pause)

    def _verdict(self, post: Post, why: str) -> str:
        often = f" {LIVES} times without a finished group in between" if post.restart else ""
        return f"{post.worker.name} died{often}: {why}. Resume with: {self._resume}"

    async def _live(self, post: Post) -> str:
        """One instance from birth to burial; returns why it died."""
        spec = post.make_spec()
        process = post.launcher.spawn(spec)
        self.present[post.worker.name] = Present(spec, process)
        self._observer.changed(self.present)
        try:
            return await self._attend(post, spec, process)
        finally:
            await end(process)
            post.launcher.bury(spec)
            del self.present[post.worker.name]
            self._observer.gone(spec.service, spec.instance)
            self._observer.changed(self.present)

    async def _attend(self, post: Post, spec: WorkerSpec, process: WorkerProcess) -> str:
        """Everything about a living instance; its death is an error that ends serving it."""
        connection = self._connect(spec)
        watching = self._watch(post, spec, process, connection)
        try:
            await together(watching, self._serve(post, spec, connection))
        except AsyncrlError as error:
            return self._why(post, spec, error)
        raise AssertionError("neither returns")

    async def _watch(self, post: Post, spec: WorkerSpec, process: WorkerProcess, connection: Connection) -> None:
        why = await process.wait()
        self._lost(post, spec, why)
        connection.fail(why)
        raise PeerLost(why)

    async def _serve(self, post: Post, spec: WorkerSpec, connection: Connection) -> None:
        try:
            await self._until_broken(post, spec, connection)
        except PeerLost as broken:
            # `_watch` speaks first if this was a death.
            await asyncio.sleep(DEATH_NOTICE)
            self._lost(post, spec, str(broken))
            raise

    async def _until_broken(self, post: Post, spec: WorkerSpec, connection: Connection) -> None:
        async with connection:
            await connection.channels[Lane.CONTROL].call("started", (), self._start_deadline)
            self._deaths[post.worker.name].lives(asyncio.get_running_loop().time())
            post.worker.connected(spec.instance, connection.channels)
            self._observer.lives(spec.service, spec.instance)
            self._note_start(post)
            await connection.lost.wait()
            raise PeerLost(connection.reason)

    def _note_start(self, post: Post) -> None:
        self._starting.pop(post.worker.name, None)
        if not self._starting:
            self._all_started.set()

    def _lost(self, post: Post, spec: WorkerSpec, why: str) -> None:
        """Nobody shall call this instance any more; said before its outstanding calls fail and are repeated."""
        deaths = self._deaths[post.worker.name]
        if deaths.count(spec.instance, asyncio.get_running_loop().time()):
            post.worker.lost(why, returns=post.restart and deaths.pause is not None)
            self._observer.lost(spec.service, spec.instance, why)

    def _why(self, post: Post, spec: WorkerSpec, error: AsyncrlError) -> str:
        """Of an instance that ended. An error while the fleet starts is the user's to see as it is."""
        if post.worker.name in self._starting and not isinstance(error, PeerLost):
            raise error
        why = str(error) if isinstance(error, PeerLost) else f"it could not start again: {error}"
        self._lost(post, spec, why)
        return why


async def end(process: WorkerProcess) -> None:
    """Stop a worker, politely first; returns when it is dead. One that outlives SIGKILL is in the kernel's hands."""
    for stage, seconds in STOP_STAGES:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                getattr(process, stage)()
                await process.wait()
                return
