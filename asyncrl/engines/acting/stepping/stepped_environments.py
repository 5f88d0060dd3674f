"""The environments of an acting worker, in children that can be killed.

    act ── actions ──> child ── states ──> answers
                         └─ dies or hangs: a new child; the environment at fault begins its next episode,
                            the others play their episodes again, from their seed and actions

An episode is lost only by the environment that it runs in, or one that does not do the same again.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.children.containment import Surroundings, containment_of
from asyncrl.children.guarded_process import ChildEnded, ChildSettings
from asyncrl.children.printed_output import ChildOutput, PrintedFile
from asyncrl.concurrency import one_error
from asyncrl.config.schema import Config
from asyncrl.config.sections.secret import revealed
from asyncrl.config.sections.task_config import ActingConfig
from asyncrl.engines.acting.stepping.answers import Answers, Floats, read_answers
from asyncrl.engines.acting.stepping.spaces import SPACES, Spaces, read_spaces, unusable_space, write_spaces
from asyncrl.engines.acting.stepping.stepping_child import ChildContent, SteppingChild
from asyncrl.errors import AsyncrlError, ConfigError, EnvironmentFailed, WireError

MOST_PLAYED = 100_000
"""Actions of an episode that are kept to play it again: some 5 MB."""
TOO_LONG = f"its process ended, and it was too long to be played again: over {MOST_PLAYED:,} steps"


@dataclass(slots=True)
class EpisodeSoFar:
    """Plays an episode again. number: of the episode; actions: as the environment got them. state: the newest.
    waiting: whether the last of the actions is not answered. fault: why it was lost, until the next one begins.
    is_long: its first actions were forgotten."""

    number: int = 0
    actions: list[bytes] = field(default_factory=list)
    state: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    waiting: bool = False
    fault: str = ""
    is_long: bool = False

    @property
    def answered(self) -> list[bytes]:
        """Returns the actions that led to the newest state."""
        return self.actions[:-1] if self.waiting else self.actions


class SteppedEnvironments:
    """Steps `settings.environments` environments in `settings.children` children. start_deadline: seconds that a child
    may take to make its own. printed: file of what they print. share_episodes: whether the episodes are those of one
    sequence, whatever the number of environments. variables: names of environment variables that children get beside
    harmless ones. lost: episodes that an environment lost by its own fault; finished:
    answers so far."""

    def __init__(
        self,
        settings: ActingConfig,
        tasks: asyncio.TaskGroup,
        *,
        seed: int,
        start_deadline: float,
        printed: Path,
        containment: Surroundings | None = None,
        spaces: Spaces | None = None,
        share_episodes: bool = False,
        variables: Sequence[str] = (),
    ) -> None:
        self._settings = settings
        self._stride = settings.environments if share_episodes else 0
        self._tasks = tasks
        self._seed = seed
        self._output = ChildOutput(PrintedFile(printed))
        self._child_settings = ChildSettings(start_deadline, tasks, self._output, containment, tuple(variables))
        self._wanted = spaces
        self._episodes = [EpisodeSoFar() for _ in range(settings.environments)]
        self._children: dict[int, SteppingChild] = {}
        self._ready: set[int] = set()  # Children whose environments are where their episodes are.
        self._ended_silently: set[int] = set()  # Children that ended since the last answer to an action.
        self._answers: asyncio.Queue[Answers | AsyncrlError] = asyncio.Queue()  # At most one for each environment.
        self._opened: dict[int, asyncio.Future[tuple[Floats, list[int]]]] = {}
        self._stopped = False
        self._lost_in_a_row = 0
        self.lost = 0
        self.finished = 0

    @property
    def spaces(self) -> Spaces:
        """Returns the spaces that all environments have; known once `start` has returned."""
        assert self._wanted is not None, "the first child says the spaces"
        return self._wanted

    async def start(self) -> None:
        """Starts all children and begins an episode in each environment. Raises ConfigError or DeadlineExceeded when
        one cannot be made, and EnvironmentFailed when it cannot begin."""
        with ExitStack() as unless_started:
            unless_started.callback(self._output.close)
            self._output.open()
            for number, owned in enumerate(self._ranges):
                try:
                    await self._open(number)
                except ChildEnded as ended:
                    at_fault = [place for place in owned if self._episodes[place].fault] or [*owned]
                    raise EnvironmentFailed(
                        f"{self._settings.env}: environment {', '.join(map(str, at_fault))} cannot begin an episode: "
                        f"{ended}"
                    ) from None
            unless_started.pop_all()

    async def begin_again(self) -> bool:
        """Begins the first episode again in each environment; returns False where that takes new environments: one has
        not answered, or has failed. Raises EnvironmentFailed when none can begin."""
        failed = any(isinstance(self._answers.get_nowait(), AsyncrlError) for _ in range(self._answers.qsize()))
        if failed or len(self._ready) < len(self._ranges) or any(episode.waiting for episode in self._episodes):
            return False
        self._episodes = [EpisodeSoFar() for _ in self._episodes]
        self._ready.clear()
        try:
            for number, child in self._children.items():
                await self._begin(number, child)
        except ChildEnded:
            return False
        return True

    async def stop(self) -> None:
        self._stopped = True
        for child in self._children.values():
            await child.kill()
        self._output.close()

    @property
    def child_settings(self) -> ChildSettings:
        """Returns how its children are started."""
        return self._child_settings

    @property
    def states(self) -> Floats:
        """Returns the newest state of each environment [environments, observation]."""
        return np.stack([episode.state for episode in self._episodes])

    def act(self, places: NDArray[np.int64], actions: Floats) -> None:
        """Sends actions to environments, each of which waits for none yet."""
        for place, action in zip(places.tolist(), actions, strict=True):
            episode = self._episodes[place]
            assert not episode.waiting, f"environment {place} has not answered yet"
            if len(episode.actions) == MOST_PLAYED:
                episode.is_long = True
                episode.actions.clear()
            episode.actions.append(action.tobytes())
            episode.waiting = True
        for number, owned in enumerate(self._ranges):
            own = [place for place in places.tolist() if place in owned]
            if own and number in self._ready:  # Actions for others are sent when they are.
                self._post(self._children[number], owned, own)

    async def answers(self) -> list[Answers]:
        """Waits for the next answers, and returns all that are there. Raises EnvironmentFailed when no episode can
        begin any more, or too many were lost in a row."""
        found = [await self._answers.get()]
        while not self._answers.empty():
            found.append(self._answers.get_nowait())
        taken = []
        for each in found:
            if isinstance(each, AsyncrlError):
                raise each
            taken.append(each)
        return taken

    # ---- children ----------------------------------------------------------------------------------------

    @property
    def _ranges(self) -> list[range]:
        """Returns the environments of each child, in order."""
        count = self._settings.environments
        children = min(self._settings.children, self._settings.environments)
        return [range(number * count // children, (number + 1) * count // children) for number in range(children)]

    async def _open(self, number: int) -> None:
        """Starts a child, whose environments go on where their episodes were."""
        owned = self._ranges[number]
        settings = self._settings
        content = ChildContent(
            settings.env,
            revealed(settings.options),
            owned.start,
            len(owned),
            settings.feedback == "asynchronous",
            self._seed,
            self._stride,
            self._wanted,
        )
        answered = partial(self._take, number)
        ended = partial(self._ended, number)
        child = await SteppingChild.spawn(content, self._child_settings, settings.deadline, answered, ended)
        self._wanted = self._wanted or child.spaces
        if self._stopped:
            await child.kill()
            return
        self._children[number] = child
        await self._begin(number, child)

    async def _begin(self, number: int, child: SteppingChild) -> None:
        """Brings the environments of a child to where their episodes are."""
        owned = self._ranges[number]
        episodes = [self._episodes[place] for place in owned]
        for episode in episodes:
            episode.fault = episode.fault or (TOO_LONG if episode.is_long else "")
        self._opened[number] = opened = asyncio.get_running_loop().create_future()
        played = [b"" if episode.fault else b"".join(episode.answered) for episode in episodes]
        numbers = [episode.number + bool(episode.fault) for episode in episodes]
        expected = [episode.state.tobytes() for episode in episodes]
        await child.send({"begin": numbers, "played": played, "expected": expected})
        self._go_on(child, owned, *await opened)
        self._ready.add(number)

    def _go_on(self, child: SteppingChild, owned: range, states: Floats, unlike: Sequence[int]) -> None:
        """Goes on with the episodes that are where they were, and ends those that were lost."""
        again = []
        for number, (place, state) in enumerate(zip(owned, states, strict=True)):
            episode = self._episodes[place]
            if number in unlike:
                episode.fault = "it cannot be played again: the same seed and actions led to another state"
            if episode.fault:
                self._end(place, episode, state)
                continue
            episode.state = state
            again += [place] if episode.waiting else []
        if again:
            self._post(child, owned, again)

    def _post(self, child: SteppingChild, owned: range, places: Sequence[int]) -> None:
        actions = b"".join(self._episodes[place].actions[-1] for place in places)
        child.post({"step": [place - owned.start for place in places], "actions": actions})

    def _take(self, number: int, message: dict[str, Any]) -> None:
        """Takes a message of a child, on the event loop."""
        self.finished += 1
        if "failed" in message:
            self._fail(number, EnvironmentFailed(f"{self._settings.env}: {message['failed']}"))
            return
        owned = self._ranges[number]
        answers = read_answers(message, owned, self.spaces.observation)
        if (opened := self._opened.pop(number, None)) is not None:
            if len(answers.places) < len(owned):
                raise WireError(f"{len(answers.places)} of {len(owned)} environments began")
            opened.set_result((answers.observations, message.get("unlike", [])))
            return
        if silent := [place for place in answers.places.tolist() if not self._episodes[place].waiting]:
            raise WireError(f"environments {silent} answered what they were not asked")
        self._ended_silently.discard(number)
        for index, place in enumerate(answers.places.tolist()):
            episode = self._episodes[place]
            episode.waiting = False
            episode.state = answers.following[index]
            if answers.ended[index]:
                self._episodes[place] = EpisodeSoFar(episode.number + 1, state=episode.state)
        self._count(answers)
        self._answers.put_nowait(answers)

    def _count(self, answers: Answers) -> None:
        """Counts the episodes that environments lost, and those that ended by themselves."""
        if answers.ended.sum() > len(answers.errors):
            self._lost_in_a_row = 0
        for place, why in answers.errors.items():
            self._count_lost(place, why)

    def _count_lost(self, place: int, why: str) -> None:
        """Counts a lost episode, and ends the run when too many follow each other."""
        self.lost += 1
        self._lost_in_a_row += 1
        if self._lost_in_a_row == self._settings.failures:
            text = f"{self._settings.env}: {self._lost_in_a_row} episodes in a row were lost, without one that ended"
            self._answers.put_nowait(EnvironmentFailed(f"{text}. The last, of environment {place}: {why}"))

    def _ended(self, number: int, ended: ChildEnded, running: Sequence[int]) -> None:
        """Takes the end of a child: the environments at fault lose their episode, and a new child goes on. Where it
        ends again before an answer, those that wait lose theirs, whoever is at fault."""
        if self._stopped:
            return
        self._ready.discard(number)
        owned = self._ranges[number]
        if number in self._ended_silently and not running:
            running = [place for place, each in enumerate(owned) if self._episodes[each].waiting]
        self._ended_silently.add(number)
        among = f" (one of the environments {[owned[place] for place in running]})" if len(running) > 1 else ""
        for place in running:
            episode = self._episodes[owned[place]]
            episode.number += bool(episode.fault)  # The next one was lost too, as it began.
            episode.fault = f"{ended}{among}"
            self._count_lost(owned[place], episode.fault)
        if (opened := self._opened.pop(number, None)) is not None:
            opened.set_exception(ended)
            opened.exception()  # Retrieved: its caller may be gone.
        if self._lost_in_a_row < self._settings.failures:
            self._tasks.create_task(self._reopen(number), name=f"environments {owned.start} to {owned.stop - 1}")

    async def _reopen(self, number: int) -> None:
        try:
            await self._open(number)
        except ChildEnded:
            return  # Its end was taken, and another child follows.
        except AsyncrlError as error:
            self._answers.put_nowait(error)

    def _end(self, place: int, episode: EpisodeSoFar, following: Floats) -> None:
        """Ends an episode that was lost. following: the first state of the next one, which has begun."""
        answered = (np.array([place]), episode.state[None], np.zeros(1, np.float32))
        ended = (np.zeros(1, np.bool_), np.ones(1, np.bool_))
        self._answers.put_nowait(
            Answers(*answered, *ended, following[None], {place: episode.fault}, continued=episode.waiting)
        )
        self._episodes[place] = EpisodeSoFar(episode.number + 1, state=following)

    def _fail(self, number: int, error: AsyncrlError) -> None:
        if (opened := self._opened.pop(number, None)) is not None:
            opened.set_exception(error)
            opened.exception()  # Retrieved: its caller may be gone.
        else:
            self._answers.put_nowait(error)


# Prepares the folder of a policy that acts: the spaces of its environment, as a first instance has them.


async def prepare_spaces(config: Config, target: Path, show: Callable[[str], None]) -> Path:
    """Returns `target` with the spaces of the environment, made at first. Raises ConfigError when the environment
    cannot be made, or the algorithm cannot act in it."""
    if await asyncio.to_thread((target / SPACES).is_file):
        spaces = read_spaces(target)
    else:
        show(f"looking at the spaces of {config.acting.env}")
        spaces = await _looked_at(config, target)
        write_spaces(target / SPACES, spaces)
    if why := unusable_space(spaces.action, config.acting.algorithm):
        raise ConfigError(f"acting.env: {config.acting.env}: {why}")
    return target


async def _looked_at(config: Config, target: Path) -> Spaces:
    """Makes one environment in a child, and begins an episode."""
    run_dir = target.parent
    with one_error():
        async with asyncio.TaskGroup() as tasks:
            environments = SteppedEnvironments(
                config.acting.model_copy(update={"environments": 1, "children": 1}),
                tasks,
                seed=config.seed,
                start_deadline=config.fleet.start_deadline,
                printed=run_dir / "logs" / "spaces.printed",
                containment=containment_of(config, [config.acting.env], run_dir=run_dir),
                variables=config.children.variables,
            )
            await environments.start()
            try:
                return environments.spaces
            finally:
                await environments.stop()
