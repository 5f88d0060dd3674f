"""Plays episodes in child processes (episode_server.py), which are replaced when they hang or crash.

Each episode lives in one child, and thousands do at a time. A child writes down whose code it runs: when it hangs or
dies, that episode is blamed, and the others are played again in a new child, from what the policy has said so far. When
nobody is known to be the cause, each call that ran is repeated alone, in one more child.
"""

import asyncio
import itertools
import os
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.children.containment import Surroundings
from asyncrl.children.guarded_process import ChildEnded, ChildSettings, ChildSlot, GuardedProcess
from asyncrl.children.printed_output import ChildOutput, PrintedFile
from asyncrl.environments.episode_server import CLOSING, MARK_BYTES, NOBODY, read_mark
from asyncrl.environments.loading import KEY, EnvironmentSpec
from asyncrl.errors import WireError
from asyncrl.protocols.batch import SampleName
from asyncrl.protocols.prompt_row import PackedRow

SERVER = "asyncrl.environments.episode_server"
OWNER = "the environment worker"
GRACE = 2.0
"""Seconds that a child may be silent beyond the deadline of a call, before it is killed."""


@dataclass(frozen=True, slots=True)
class Play:
    """A request for the answers up to the turn after `said`, what the policy has said in this episode. sampled: the
    fields of a SampledAnswer for each of these, where environments take them. opened: for each of these, whether it
    began inside thoughts; nothing where none did."""

    episode: SampleName
    row: PackedRow
    seed: int
    said: tuple[str, ...]
    sampled: tuple[dict[str, Any], ...] = ()
    opened: tuple[bool, ...] = ()


@dataclass(slots=True)
class Played:
    """The answers of a call, by turn; 0 is the opening. error: why the episode cannot go on, or ""."""

    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: str = ""
    traceback: str = ""


class EpisodeLost(ChildEnded):
    """The child ended during a call. at_fault: whether it ran the code of this call; None: that is not known."""

    def __init__(self, ended: ChildEnded, at_fault: bool | None) -> None:
        super().__init__(str(ended), vanished=ended.vanished)
        self.at_fault = at_fault


@dataclass(eq=False, slots=True)
class EpisodeCall:
    """A call that runs in a child."""

    played: Played
    done: "asyncio.Future[Played]"
    began: float

    def collect(self, answer: dict[str, Any], turn: int, last: bool) -> None:
        """Takes the answer of a turn."""
        if "error" in answer:
            self.played.error = str(answer["error"])
            self.played.traceback = str(answer.get("traceback", ""))
        else:
            self.played.answers[turn] = answer
        if last and not self.done.done():
            self.done.set_result(self.played)

    def fail(self, ended: ChildEnded) -> None:
        if not self.done.done():
            self.done.set_exception(ended)
            self.done.exception()  # Retrieved: its caller may be gone.


class EpisodeChild(GuardedProcess):
    """A running child. It counts the answers that it sent. unclosed: takes why `close` of an environment failed.
    takes_sampled: environments are told what the engine recorded of an answer."""

    unclosed: Callable[[str], None]
    _watching: "asyncio.Task[None]"
    takes_sampled = False

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._mark = -1
        self._last_mark = NOBODY
        self._known: dict[SampleName, int] = {}  # The turns that the child has taken, or will have.
        self._running: dict[int, EpisodeCall] = {}
        self._numbers = itertools.count(CLOSING + 1)
        self._heard = 0.0
        self._called = asyncio.Event()
        self._hung: ChildEnded | None = None

    @classmethod
    async def spawn(
        cls, spec: EnvironmentSpec, settings: ChildSettings, deadline: float, unclosed: Callable[[str], None]
    ) -> "EpisodeChild":
        """Starts a child that loads the environment; raises as `GuardedProcess.launch` does. deadline: seconds that one
        call of the user's code may take."""
        mark = os.memfd_create("asyncrl-mark")
        with ExitStack() as unless_started:
            unless_started.callback(os.close, mark)
            os.ftruncate(mark, MARK_BYTES)
            code = asdict(spec) | {"mark": mark, "deadline": deadline}
            child = await cls.launch(SERVER, code, f"{KEY}: {spec.use}", settings, (mark,))
            child._mark = mark
            child.unclosed = unclosed
            child._watching = settings.tasks.create_task(child._watch(deadline), name=f"watch {child.process.pid}")
            unless_started.pop_all()
        return child

    def greeted(self, message: Any) -> None:
        match message:
            case {"loaded": True, "takes_sampled": bool(takes)}:
                self.takes_sampled = takes
            case _:
                raise WireError(f"a child of environments began with {message!r:.100}")

    async def play(self, play: Play) -> Played:
        """Returns the answers that the episode lacked. Raises EpisodeLost when the child died, or was killed because it
        said nothing for too long."""
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        call = EpisodeCall(Played(), loop.create_future(), loop.time())
        self._running[number] = call
        self._called.set()
        known = self._known.get(play.episode, len(play.said) + 1)
        begins = known > len(play.said)
        row = play.row.data.tobytes() if begins else None
        self._known[play.episode] = len(play.said)
        message = {"call": number, "episode": play.episode, "said": play.said, "seed": play.seed, "row": row}
        message["opened"] = play.opened
        message["sampled"] = play.sampled if begins else play.sampled[known:]
        try:
            self.post(message)
            return await call.done
        except ChildEnded as ended:
            raise EpisodeLost(ended, self._is_at_fault(number)) from None
        finally:
            del self._running[number]
            call.done.cancel()

    def forget(self, episodes: Iterable[SampleName]) -> None:
        """Lets the child close and forget these episodes."""
        if known := [episode for episode in episodes if self._known.pop(episode, None) is not None]:
            self.post({"end": known})

    async def _watch(self, deadline: float) -> None:
        """Kills the child when calls run and it answers none of them for `deadline` seconds and a little more."""
        loop = asyncio.get_running_loop()
        while True:
            await self._called.wait()
            if not self._running:
                self._called.clear()
                continue
            oldest = next(iter(self._running.values()))
            until = max(oldest.began, self._heard) + deadline + GRACE
            if until <= loop.time():
                break
            await asyncio.sleep(until - loop.time())
        self._hung = ChildEnded(f"it hung: no answer within {deadline:g} s")
        await self.kill()

    def _is_at_fault(self, number: int) -> bool | None:
        """Returns whether the child runs the code of this call, or ran it when it ended; None: nobody's is known."""
        marked = self._last_mark if self._mark < 0 else read_mark(self._mark)
        return None if marked == NOBODY else marked == number

    def take(self, message: Any) -> None:
        match message:
            case {"call": int(number), "turn": int(turn), "last": bool(last), "seconds": float()}:
                self.finished += 1
                self._heard = asyncio.get_running_loop().time()
                if (call := self._running.get(number)) is not None:
                    call.collect(message, turn, last)
            case {"unclosed": str(error), "traceback": str(trace)}:
                self.unclosed(f"{error}\n{trace}".rstrip())
            case _:
                raise WireError(f"{message!r:.100}")

    def finish(self, ended: ChildEnded) -> None:
        self._watching.cancel()
        if self._mark >= 0:
            self._last_mark = read_mark(self._mark)
            os.close(self._mark)
            self._mark = -1
            if self._last_mark == CLOSING:
                self.unclosed(f"`close` hung or ended its process: {ended}")
        for call in self._running.values():
            call.fail(self._hung or ended)


class EpisodePool:
    """Plays episodes in `workers` children. deadline: seconds that one call of `reset` or `step` may take.
    start_deadline: seconds that a child may take to load the environment. tasks: owns what reads answers. printed: file
    of what environments print. unclosed: takes why the method `close` of an environment failed. queued: calls that were
    not answered yet. takes_sampled: once it has started, as of its children. containment: None: nothing
    contains the children. variables: names of environment variables that they get beside harmless ones."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        tasks: asyncio.TaskGroup,
        *,
        workers: int,
        deadline: float,
        start_deadline: float,
        printed: Path,
        unclosed: Callable[[str], None],
        containment: Surroundings | None = None,
        variables: Sequence[str] = (),
    ) -> None:
        self._output = ChildOutput(PrintedFile(printed))
        settings = ChildSettings(start_deadline, tasks, self._output, containment, tuple(variables))
        spawn = partial(EpisodeChild.spawn, spec, settings, deadline, self._report)
        self._slots = [ChildSlot(OWNER, spawn) for _ in range(workers)]
        self._alone = ChildSlot(OWNER, spawn)
        self._alone_at_a_time = asyncio.Lock()
        self._homes: dict[SampleName, ChildSlot[EpisodeChild]] = {}
        self._unclosed = unclosed
        self._stopped = False
        self.takes_sampled = False
        self._living = Counter[int]()
        self.queued = 0

    @property
    def finished(self) -> int:
        """Answers of environments so far."""
        return sum(slot.finished for slot in (self._alone, *self._slots))

    async def start(self) -> None:
        """Starts a child; raises ConfigError if it cannot load the environment, DeadlineExceeded if that takes too
        long."""
        with ExitStack() as unless_started:
            unless_started.callback(self._output.close)
            self._output.open()
            self.takes_sampled = (await self._slots[0].child()).takes_sampled
            unless_started.pop_all()

    async def stop(self) -> None:
        """Kills all children; calls that still run end with a result that says so."""
        self._stopped = True
        for slot in (self._alone, *self._slots):
            await slot.stop()
        self._output.close()

    async def play(self, play: Play) -> Played:
        """Returns the answers that the episode lacked; errors of the environment are answers too."""
        self.queued += 1
        try:
            while True:
                try:
                    return await (await self._home(play.episode).child()).play(play)
                except EpisodeLost as ended:
                    if ended.at_fault is not False:
                        return await self._repeat(play, ended)
                except ChildEnded as ended:
                    return Played(error=str(ended))
        finally:
            self.queued -= 1

    async def _repeat(self, play: Play, ended: EpisodeLost) -> Played:
        """Repeats a call alone, unless it is known to be the cause that its child ended. A signal may have come from
        outside."""
        if ended.at_fault and not ended.vanished:
            return Played(error=str(ended))
        async with self._alone_at_a_time:
            try:
                return await (await self._alone.child()).play(play)
            except ChildEnded as again:
                twice = "; so was another one at the same turn" if ended.vanished and again.vanished else ""
                return Played(error=f"{again}{twice}")
            finally:
                _forget(self._alone, [play.episode])

    def forget(self, episodes: Sequence[SampleName]) -> None:
        """Ends these episodes; unknown ones are ignored."""
        for name in episodes:
            if (slot := self._homes.pop(name, None)) is not None:
                self._living[self._slots.index(slot)] -= 1
        for slot in self._slots:
            _forget(slot, episodes)

    def _report(self, why: str) -> None:
        if not self._stopped:
            self._unclosed(why)

    def _home(self, episode: SampleName) -> ChildSlot[EpisodeChild]:
        """Returns the slot of an episode: for a new one, that with the fewest episodes."""
        if episode not in self._homes:
            number = min(range(len(self._slots)), key=self._living.__getitem__)
            self._living[number] += 1
            self._homes[episode] = self._slots[number]
        return self._homes[episode]


def _forget(slot: ChildSlot[EpisodeChild], episodes: Sequence[SampleName]) -> None:
    if slot.running is not None and not slot.running.ended:
        slot.running.forget(episodes)
