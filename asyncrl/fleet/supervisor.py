"""Keeps workers alive: starts them, notices a death at once, restarts the worker or ends the fleet.

    spawn ──> connect ──> `started` ──> takes calls ──> dead ──> outstanding calls fail ──> pause ──> spawn
                                            │            ^└──> MAX_DEATHS deaths at all replicas: FleetFailed
                                            └── raises ──┤
                                                         └──> trainer or critic: FleetFailed, or Learners ──> spawn

What ends after which failure is in failure_table.py.

An instance that is asked to leave drains: it takes no new work, and ends once it holds nothing, or at a deadline. A
worker that is not wanted any more is parked then, until it is wanted again.
A worker may take its whole start deadline to load; only the kernel or a broken connection tells that it is dead.
Cancelling `run` stops all workers.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from asyncrl.concurrency import gather, one_error, unwrap
from asyncrl.errors import AsyncrlError, FleetFailed, PeerLost, Refused, errno_in
from asyncrl.fleet.failure_table import MISTAKES, Ends, Raised, When, Who, is_everywhere, what_ends
from asyncrl.fleet.launching.join_point import JoinedWorker
from asyncrl.fleet.launching.joining import START_TRIES
from asyncrl.fleet.launching.launcher import LaunchedWorker, Launcher, end_worker
from asyncrl.fleet.lifecycle_events import (
    FleetEvent,
    OfferDropped,
    WorkerCleanedUp,
    WorkerLost,
    WorkerSpawned,
    WorkerStarted,
)
from asyncrl.fleet.remote_worker import DEATH_NOTICE, OutstandingCall, RemoteWorker, WorkerConnection
from asyncrl.fleet.replicas import Replicas
from asyncrl.fleet.worker.worker_spec import WorkerSpec

MAX_DEATHS = 6
"""Deaths of one worker without a finished group in between that end the run, because the cause returns. One more than
a group's deaths until it is a suspect and the deaths without it that crash attribution allows for (2 and 3)."""
MAX_TESTED = 6
"""Deaths of workers that one suspect had for itself which do not count: at most so many prove that it crashes them."""
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 8.0
LONGEST_OFFER_PAUSE = 60.0
"""Seconds between two tries to start a newcomer that cannot start: a person has to look at its host."""
DRAIN_CHECK = 0.1
"""Seconds between two looks at whether an instance that leaves holds anything yet."""
LONG_LIFE = 10.0
"""Seconds of taking calls after which a death counts as the first of its kind, and not as part of a crash loop: three
times what a start takes. So does that of an instance that had done some of its work."""


@dataclass(slots=True)
class DeathCounter:
    """Counts a worker's deaths and computes the pause before its restart. Times in seconds, of any clock.

    in_a_row: deaths after short lives. since_progress: deaths since a group was finished. tested: those of them that
    happened while a suspect had the worker for itself, by suspect. started_at: when the running instance took calls.
    """

    in_a_row: int = 0
    since_progress: int = 0
    tested: Counter[int] = field(default_factory=Counter)
    _last_dead: str = ""
    started_at: float | None = None

    def note_leave(self, instance: str) -> bool:
        """Notes an instance whose host left, which is no death. Returns False when it was noted or counted."""
        is_new = instance != self._last_dead
        self._last_dead = instance
        self.started_at = None
        return is_new

    def count(
        self, instance: str, now: float, suspect: int | None = None, *, worked: bool = False, on_offer: bool = False
    ) -> bool:
        """Counts the death of an instance. Returns False when it was counted: process and connection both report it.

        suspect: the isolated group that had the instance for itself. worked: whether it had answered work. on_offer: a
        host that joined could not start it, which costs the host's offer and keeps no other host from doing it.
        """
        if instance == self._last_dead:
            return False
        lifetime = 0.0 if self.started_at is None else now - self.started_at
        self._last_dead = instance
        self.started_at = None
        self.in_a_row = 1 if worked or lifetime >= LONG_LIFE else self.in_a_row + 1
        self.since_progress += not on_offer
        if suspect is not None:
            self.tested[suspect] += 1
        return True

    def progressed(self) -> None:
        """Notes that a group was finished."""
        self.since_progress = 0
        self.tested.clear()

    @property
    def unexplained(self) -> int:
        """Returns the deaths since progress that count. Those that may prove that one group crashes workers do not,
        because they end when it is dropped; the deaths of a second such group do, or a worker that dies of every group
        would have them all dropped."""
        return self.since_progress - min(max(self.tested.values(), default=0), MAX_TESTED)

    @property
    def is_too_often(self) -> bool:
        return self.unexplained >= MAX_DEATHS

    def pause_of(self, longest: float, raised: int = 0) -> float:
        """Returns the seconds until the restart, doubled from FIRST_PAUSE with each short life without work, and each
        time that the worker `raised` the same in a row.

        Progress does not shorten it: another replica may make the progress while this worker dies at every start.
        """
        doublings = min(max(0, self.in_a_row - 1, raised - 1), 10)
        return min(longest, FIRST_PAUSE * 2.0**doublings)


@dataclass(slots=True)
class WorkerSlot:
    """A worker to keep alive. replicas: of its service. make_spec: makes its next instance. restart: whether the run
    survives its death. is_guest: whether it is in the process of another worker, whose death ends the run. is_joined:
    whether a host has to offer to run it. is_awaited: whether the fleet is only handed over with it. wanted: cleared
    while no instance is to run. spawning: scope of the wait for a launcher."""

    worker: RemoteWorker
    replicas: Replicas
    make_spec: Callable[[], WorkerSpec]
    launcher: Launcher
    restart: bool
    is_guest: bool = False
    is_awaited: bool = True
    is_joined: bool = False
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    spawning: asyncio.Timeout | None = None
    deaths: DeathCounter = field(default_factory=DeathCounter)
    was_started: bool = False

    def __post_init__(self) -> None:
        self.wanted.set()

    def end_wait(self) -> None:
        """Ends the wait for a launcher: the instance is not wanted, or another one."""
        if self.spawning is not None and not self.spawning.expired():
            self.spawning.reschedule(asyncio.get_running_loop().time())

    @property
    def is_idle(self) -> bool:
        """Returns whether its instance holds nothing that a group needs."""
        return self.replicas.is_idle(self.worker.replica)


class Learners:
    """The workers that learn, in a run that goes back to a checkpoint when one of them dies: each dead one waits here
    until all of them start again, or the run ends. lost: why the first one died since the last start. killed: whether
    one was killed since, because it hung."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiting: dict[str, asyncio.Future[bool]] = {}
        self.killed = False

    async def watch(self) -> None:
        """Raises FleetFailed once a worker that learns died."""
        raise FleetFailed(await asyncio.shield(self.lost))

    async def may_start_again(self, name: str, reason: str) -> bool:
        """Waits, after a death, for what the run does; returns whether the worker starts again."""
        if not self.lost.done():
            self.lost.set_result(f"{name} died: {reason}")
        decided: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.waiting[name] = decided
        return await decided

    def start_again(self) -> None:
        self.lost = asyncio.get_running_loop().create_future()
        self.killed = False
        waiting = self.waiting
        self.waiting = {}
        for decided in waiting.values():
            decided.set_result(True)

    def give_up(self) -> None:
        """Ends the fleet with the death of the first one."""
        for decided in (*self.waiting.values(),)[:1]:
            decided.set_result(False)


@dataclass(eq=False, slots=True)
class RunningInstance:
    """An instance that was spawned and is not cleaned up yet. leave: gets the seconds in which it is to drain. failure:
    what it raised, for which it ends."""

    slot: WorkerSlot
    launched: LaunchedWorker
    connection: WorkerConnection
    leave: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    failure: str = ""

    @property
    def has_left(self) -> bool:
        is_asked = self.leave.done() and not self.leave.cancelled()  # As the wait for it is when the instance fails.
        return is_asked or self.launched.has_left

    @property
    def spec(self) -> WorkerSpec:
        return self.launched.spec


class Supervisor:
    """Runs the workers of `slots`.

    connect: makes the connection to an instance. emit: takes the events of workers; must not block. resume: the command
    that resumes the run, for error messages. isolated: the groups that run alone now. instances: what is running now,
    by the worker's name. all_started: set when every awaited worker has taken calls once, each within its own
    start deadline. learners: None while the death of one ends the fleet.

    A worker has one task here and at most one instance at a time, which that task alone starts, serves and cleans up.
    All others ask: RunningFleet has instances killed and failed, hosts that leave retire them, scaling adds and parks
    workers, a return to a checkpoint ends and replaces them.
    """

    def __init__(
        self,
        slots: list[WorkerSlot],
        connect: Callable[[WorkerSpec], WorkerConnection],
        emit: Callable[[FleetEvent], None],
        resume: str,
        isolated: Collection[int] = (),
    ) -> None:
        self.instances: dict[str, RunningInstance] = {}
        self.learners: Learners | None = None
        self.all_started = asyncio.Event()
        self._slots = slots
        self._tasks: asyncio.TaskGroup
        self._died_since_progress: dict[str, WorkerSlot] = {}
        self._connect = connect
        self._emit = emit
        self._resume = resume
        self._isolated = isolated

    def progressed(self) -> None:
        """Notes a finished group: the earlier deaths do not keep the run from going on."""
        for slot in self._died_since_progress.values():
            slot.deaths.progressed()
        self._died_since_progress.clear()

    def kill(self, instance: str) -> None:
        """Kills this instance if it still runs; its worker is restarted."""
        for each in self.instances.values():
            if each.spec.instance == instance:
                each.launched.kill()
                if self.learners is not None and not each.slot.restart:
                    self.learners.killed = True

    def fail(self, worker: RemoteWorker, call: OutstandingCall, error: AsyncrlError) -> bool:
        """Ends the instance that raised this error in a call, where the failure table says so, as if it had died of it:
        its calls are made again elsewhere. Returns False where the run ends with the error itself."""
        slot = next(each for each in self._slots if each.worker is worker)
        who = self._who(slot)
        is_mistake = isinstance(error, MISTAKES)
        is_next_too = is_mistake or errno_in(str(error)) is not None  # A full disk is full for the next trainer, too.
        if what_ends(who, When.CALL) is Ends.RUN or (who is Who.RANK and is_next_too):
            return False
        running = self.instances.get(worker.name)
        if running is not None and running.spec.instance == call.instance and not running.failure:
            worker.raised = Raised.of(call.method, error, worker.host.name, call.groups).after(worker.raised)
            if is_mistake and is_everywhere(self._raised(slot)):
                return False
            if is_mistake:
                worker.met_mistake = call.instance, frozenset(call.groups)
            self.replace(running, str(error))
        return True

    def replace(self, running: RunningInstance, reason: str) -> None:
        """Ends an instance as if it had died: its calls fail now, and its worker is started again."""
        running.failure = reason
        self._mark_lost(running, reason)
        running.connection.fail(reason)
        self.kill(running.spec.instance)

    def retire(self, instance: str, seconds: float) -> bool:
        """Ends an instance once it holds nothing that a group needs, or after so many seconds, which is no death.
        Returns whether such an instance runs."""
        for each in self.instances.values():
            if each.spec.instance == instance:
                each.slot.replicas.drain(each.slot.worker.replica)
                if not each.leave.done():
                    each.leave.set_result(seconds)
                return True
        return False

    def slots_of(self, service: str) -> list[WorkerSlot]:
        return [slot for slot in self._slots if slot.worker.service == service]

    def slots(self, *, learning: bool) -> list[WorkerSlot]:
        """Returns the workers that learn, which are not restarted one by one, or all others."""
        return [slot for slot in self._slots if slot.restart != learning]

    async def end_learners(self) -> None:
        """Kills all workers that learn; returns once their processes are gone and they wait
        for the next start."""
        assert self.learners is not None, "the run goes back to a checkpoint"
        slots = self.slots(learning=True)
        while any(slot.worker.name not in self.learners.waiting for slot in slots):
            for slot in slots:  # One may be started only now.
                if (running := self.instances.get(slot.worker.name)) is not None:
                    running.launched.kill()
            await asyncio.sleep(DRAIN_CHECK)

    def add(self, slot: WorkerSlot) -> None:
        """Keeps one more worker alive, while `run` goes on. Raises Refused when it ends already."""
        work = self._keep_alive(slot)
        try:
            self._tasks.create_task(work, name=f"supervision of {slot.worker.name}")
        except RuntimeError as ending:
            work.close()
            raise Refused(f"the run is ending, and starts no {slot.worker.name} any more") from ending
        self._slots.append(slot)

    def park(self, slot: WorkerSlot, seconds: float) -> None:
        """Ends the instance of a worker as `retire` does, and starts no other one until it is wanted."""
        slot.wanted.clear()
        slot.end_wait()
        if (running := self.instances.get(slot.worker.name)) is not None:
            self.retire(running.spec.instance, seconds)

    async def run(self) -> None:
        """Keeps all workers alive until cancelled, then stops them.

        Raises:
            FleetFailed: a worker that is not restarted died, or all replicas of a service too often, or of the same.
            AsyncrlError: what a worker raised during the first start of the fleet.
        """
        with one_error(unwrap):
            async with asyncio.TaskGroup() as self._tasks:
                for slot in self._slots:
                    self._tasks.create_task(self._keep_alive(slot), name=f"supervision of {slot.worker.name}")

    async def _keep_alive(self, slot: WorkerSlot) -> None:
        while True:
            if not slot.wanted.is_set():
                slot.replicas.set_parked(slot.worker.replica, parked=True)
                await slot.wanted.wait()
                slot.replicas.set_parked(slot.worker.replica, parked=False)
            if (launched := await self._spawn(slot)) is None:
                continue
            reason = launched if isinstance(launched, str) else await self._run_instance(slot, launched)
            if slot.is_guest:
                return  # Its host says why.
            if not slot.restart and self.learners and await self.learners.may_start_again(slot.worker.name, reason):
                slot.worker.restarting = True
                continue
            if not slot.restart or self._ends_run(slot):
                raise FleetFailed(f"{_died(slot)}: {reason}. Resume with: {self._resume}")
            if self._who(slot) is Who.NEWCOMER and not slot.is_joined and slot.deaths.in_a_row >= START_TRIES:
                slot.deaths.in_a_row = 0
                slot.wanted.clear()
                self._emit(OfferDropped(slot.worker.service, slot.worker.name, reason))
                continue
            times = slot.worker.raised.times if slot.worker.raised is not None else 0
            longest = LONGEST_OFFER_PAUSE if self._who(slot) is Who.NEWCOMER or times > 1 else LONGEST_PAUSE
            await asyncio.sleep(slot.deaths.pause_of(longest, times))

    def _who(self, slot: WorkerSlot) -> Who:
        if not slot.restart:
            return Who.RANK if self.learners is not None and not slot.is_guest else Who.FIXED
        is_new = not slot.was_started and (self.all_started.is_set() or not slot.is_awaited)
        return Who.NEWCOMER if is_new else Who.WORKER

    @property
    def _start(self) -> When:
        return When.START if self.all_started.is_set() else When.FIRST_START

    def _ends_run(self, slot: WorkerSlot) -> bool:
        """Returns whether the run ends with the last death of a worker that starts again alone."""
        is_too_often = all(each.deaths.is_too_often for each in self._all_of(slot))
        when = When.EVERYWHERE if is_too_often or is_everywhere(self._raised(slot)) else When.CALL
        return what_ends(self._who(slot), when) is Ends.RUN

    def _all_of(self, slot: WorkerSlot) -> list[WorkerSlot]:
        """Returns the worker and the others of its service that count: those that run, or are to run again."""
        others = [
            each
            for each in self.slots_of(slot.worker.service)
            if each is not slot and each.was_started and each.wanted.is_set()
            if not (each.is_joined and each.spawning is not None)  # No host offers to run it.
        ]
        return [slot, *others]

    def _raised(self, slot: WorkerSlot) -> list[Raised | None]:
        return [each.worker.raised for each in self._all_of(slot)]

    async def _spawn(self, slot: WorkerSlot) -> LaunchedWorker | str | None:
        """Has the next instance started; returns why it could not be, and None when it is not wanted any more, or
        another one has to be."""
        try:
            async with asyncio.timeout(None) as wait:
                slot.spawning = wait
                return await slot.launcher.spawn(slot.make_spec())
        except PeerLost:
            return None  # The launcher said why.
        except OSError as error:  # Of the launcher, or the end of the wait for it.
            if wait.expired() or not slot.wanted.is_set():
                return None
            if what_ends(self._who(slot), self._start) is Ends.RUN:
                raise
            spec = slot.make_spec()
            reason = f"it could not be started: {error}"
            slot.deaths.count(spec.instance, asyncio.get_running_loop().time())
            self._emit(WorkerLost(spec.service, spec.instance, reason))
            return reason
        finally:
            slot.spawning = None

    async def _run_instance(self, slot: WorkerSlot, launched: LaunchedWorker) -> str:
        """Runs one instance from its start to its cleanup; returns why it died."""
        spec = launched.spec
        slot.worker.host = launched.host
        running = RunningInstance(slot, launched, self._connect(spec))
        self.instances[slot.worker.name] = running
        self._emit(WorkerSpawned(spec.service, spec.instance))
        try:
            await gather(self._watch_end(running), self._serve(running), self._drain(running))
        except PeerLost as lost:
            reason = running.failure or str(lost)
            if slot.is_guest:
                launched.kill()  # Its host does not go on without it.
        except AsyncrlError as error:
            if not slot.was_started and what_ends(self._who(slot), self._start) is Ends.RUN:
                raise  # The user has to see what a worker raises at its first start.
            reason = f"it could not start on {launched.host.name}: {error}"
            self._mark_lost(running, reason)
        finally:
            if not slot.is_guest:  # Its host is ended, which an error of its start must not wait for.
                await end_worker(launched)
            slot.launcher.clean_up(spec)
            del self.instances[slot.worker.name]
            host_is_gone = isinstance(launched, JoinedWorker) and launched.host_is_gone
            self._emit(WorkerCleanedUp(spec.service, spec.instance, host_is_gone))
        return reason

    async def _watch_end(self, running: RunningInstance) -> None:
        reason = await running.launched.wait()
        self._mark_lost(running, reason)
        running.connection.fail(reason)
        raise PeerLost(reason)

    async def _drain(self, running: RunningInstance) -> None:
        """Ends the instance once it is to leave and holds nothing, at the latest when its time is over."""
        seconds = await running.leave
        slot = running.slot
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:  # Calls that end and rows that are released notify nobody.
                    if slot.is_idle:
                        break
                    await asyncio.sleep(DRAIN_CHECK)
        is_drained = slot.is_idle
        reason = "it finished what it had" if is_drained else f"{seconds:g} s were too short for what it had"
        self._mark_lost(running, reason, is_drained=is_drained)
        running.connection.fail(reason)
        raise PeerLost(reason)

    async def _serve(self, running: RunningInstance) -> None:
        slot = running.slot
        spec = running.spec
        connection = running.connection
        try:
            async with connection:
                slot.deaths.started_at = asyncio.get_running_loop().time()
                slot.worker.connected(spec.instance, connection.channels)
                self._emit(WorkerStarted(spec.service, spec.instance))
                if not slot.was_started:
                    slot.deaths.progressed()  # What other hosts could not start is no death of this worker.
                slot.was_started = True
                if not self.all_started.is_set():
                    self._note_start()
                await connection.lost.wait()
                raise PeerLost(connection.reason)
        except PeerLost as broken:
            # If the worker died, `_watch_end` reports that first, with the cause.
            await asyncio.sleep(DEATH_NOTICE)
            self._mark_lost(running, str(broken))
            raise

    def _note_start(self) -> None:
        if all(slot.was_started or not slot.is_awaited for slot in self._slots):
            self.all_started.set()

    def _mark_lost(self, running: RunningInstance, reason: str, *, is_drained: bool = False) -> None:
        """Keeps new calls from this instance, before its outstanding calls fail and are repeated elsewhere."""
        slot = running.slot
        spec = running.spec
        if running.has_left:
            if slot.deaths.note_leave(spec.instance):
                slot.worker.lost(reason, restarting=True)
                self._emit(WorkerLost(spec.service, spec.instance, reason, True, is_drained))
            return
        groups = {*slot.worker.groups_at(spec.instance)}
        suspect = groups.pop() if len(groups) == 1 and groups.issubset(self._isolated) else None
        now = asyncio.get_running_loop().time()
        worked = slot.worker.has_worked
        launched = running.launched
        has_run = slot.deaths.started_at is not None
        on_offer = isinstance(launched, JoinedWorker) and not has_run
        if slot.deaths.count(spec.instance, now, suspect, worked=worked, on_offer=on_offer):
            if isinstance(launched, JoinedWorker):
                launched.give_up(reason, has_run=has_run)
            self._died_since_progress[slot.worker.name] = slot
            slot.worker.lost(reason, restarting=slot.restart and not self._ends_run(slot))
            self._emit(WorkerLost(spec.service, spec.instance, reason))


def _died(slot: WorkerSlot) -> str:
    """Describes the last death of a worker, for which the run ends."""
    if not slot.restart:
        return f"{slot.worker.name} died"
    if not slot.deaths.is_too_often:
        return f"all workers of {slot.worker.service} raised the same"
    return f"{slot.worker.name} died {slot.deaths.since_progress} times without a finished group in between"
