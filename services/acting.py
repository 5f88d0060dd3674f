"""Acts in environments with the policy: generation and evaluation of a run with `acting.env`.

    generate ── recordings ──┐        ┌── full recordings ── rows ── reference to the caller
    use_weights ── weights ──┼ loop ──┤
    pause, resume ───────────┘        └── environments in children that can be killed

A group is one sample of each environment. Episodes go on from sample to sample, so what a sample has depends on those
before it: a group that is tried again has other transitions.

In an evaluation a group is all its episodes, and its members are their numbers. The same number has the same seed in
each evaluation. The policy does not explore. No rows are stored: the references say how each episode ended.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from asyncrl.concurrency import next_items
from asyncrl.config.gate_config import GateConfig
from asyncrl.config.sections.task_config import ActingConfig
from asyncrl.engines.acting.acting_loop import NO_WEIGHTS, ActingLoop, ActingPolicy, Recording
from asyncrl.engines.acting.acting_trainer import WEIGHTS
from asyncrl.engines.acting.episode_player import LOST, EpisodePlayer, PlayedEpisode
from asyncrl.engines.acting.networks import performed
from asyncrl.engines.acting.stepping.answers import Floats
from asyncrl.engines.acting.stepping.picture_child import EpisodePictures
from asyncrl.engines.acting.stepping.spaces import Spaces, read_spaces
from asyncrl.engines.acting.stepping.stepped_environments import SteppedEnvironments
from asyncrl.engines.acting.transitions import transition_columns
from asyncrl.errors import ConfigError, DeadlineExceeded, EnvironmentFailed, LostRows, PeerLost
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.data.row_store import bytes_of_row
from asyncrl.lanes.weights.leases import must_flip
from asyncrl.lanes.weights.transports.transport_ends import WeightReceiver, open_receiver
from asyncrl.protocols.batch import BatchRef, RowRef, SampleName
from asyncrl.protocols.messages import Boundary, PromptGroup, Published, SampleText, Using
from asyncrl.protocols.seeds import group_seed
from asyncrl.protocols.service_contracts import Generation
from asyncrl.services.pooled_service import PooledService
from asyncrl.telemetry.run_directory import RunDirectory, replace_bytes
from asyncrl.telemetry.samples_file import TRANSITIONS

# ---- transitions for a person: plain values with numbers to four digits --------------------------------------------


SHOWN = ("observations", "actions", "logprobs", "rewards", "terminated", "truncated", "versions")
"""Columns of rows that are shown."""


def shown_transitions(columns: dict[str, NDArray[Any]], spaces: Spaces, most: int) -> list[dict[str, Any]]:
    """Returns the first `most` transitions of a row at most: observation, action as the environment got it, logprob,
    reward, version, and ended: "terminated" or "truncated", where an episode ended. columns: those of SHOWN."""
    observations = columns["observations"].reshape(-1, spaces.observation)[:most]
    stored = torch.from_numpy(np.array(columns["actions"])).reshape(-1, spaces.action.stored)[:most]
    rows = zip(observations, performed(stored, spaces.action), *(columns[name] for name in SHOWN[2:]), strict=False)
    return [
        {
            "observation": _digits(observation),
            "action": int(action[0]) if spaces.action.kind == "discrete" else _digits(action),
            "logprob": _digit(logprob),
            "reward": _digit(reward),
            "version": int(version),
            **({"ended": "terminated" if terminated else "truncated"} if terminated or truncated else {}),
        }
        for observation, action, logprob, reward, terminated, truncated, version in rows
    ]


def _digits(values: Iterable[float]) -> list[float]:
    return [_digit(value) for value in values]


def _digit(value: float) -> float:
    return float(f"{value:.4g}")


# ---- services with a policy, and environments in children that can be killed ---------------------------------------


class ActingPool:
    """The environments of a worker as a pool of code. queued: samples that wait, once the loop runs."""

    def __init__(self, environments: SteppedEnvironments) -> None:
        self.environments = environments
        self.queued = 0

    @property
    def finished(self) -> int:
        return self.environments.finished

    async def start(self) -> None:
        await self.environments.start()

    async def stop(self) -> None:
        await self.environments.stop()


class PolicyWorker(PooledService):
    """Takes published weights into its policy. settings: of its environments. seed: of their episodes. share_episodes:
    as in SteppedEnvironments."""

    _pool: ActingPool

    def __init__(
        self, context: WorkerContext, settings: ActingConfig, seed: int, *, share_episodes: bool = False
    ) -> None:
        super().__init__(context)
        self._settings = settings
        self._seed = seed
        self._share_episodes = share_episodes
        self._spaces = read_spaces(context.facts.model_dir)
        self._policy = ActingPolicy(context.config, self._spaces, seed)
        self._pool = ActingPool(self._new_environments())
        self._receiver: WeightReceiver | None = None
        self._published: Published | None = None
        self._weights_lock = asyncio.Lock()

    def _new_environments(self) -> SteppedEnvironments:
        context = self.context
        spec = self.context.spec
        name = "acting" if spec.service == "generation" else spec.service
        return SteppedEnvironments(
            self._settings,
            context.tasks,
            seed=self._seed,
            start_deadline=context.config.fleet.start_deadline,
            printed=RunDirectory(context.facts.run_dir).printed_by(f"{name}{spec.replica}"),
            containment=self.containment([self._settings.env]),
            variables=context.config.children.variables,
            spaces=self._spaces,
            share_episodes=self._share_episodes,
        )

    async def stop(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        await super().stop()

    async def use_weights(self, published: Published) -> Using:
        self.check_incarnation(published.incarnation, f"version {published.version}")
        if not published.is_kept_for(self.context.spec.instance):
            return Using((), published.version)
        async with self._weights_lock:
            if must_flip(self._published, published):
                await self._load(published)
                self._published = published
        return Using((self.context.spec.instance,), self._policy.version)

    @property
    def weights_version(self) -> int | None:
        return None if self._policy.version == NO_WEIGHTS else self._policy.version

    async def _load(self, published: Published) -> None:
        context = self.context
        if self._receiver is None:
            self._receiver = open_receiver(published, self._policy.spec, context.weight_network, "cpu")
        with context.occupancy.awaiting_weights():
            await self._receiver.fetch(published)
        await context.compute.run(self._load_weights, self._receiver, published)
        self._loaded()

    def _load_weights(self, receiver: WeightReceiver, published: Published) -> None:
        """Loads weights on the compute thread, so that no action is half of old ones."""
        with self.context.occupancy.exchanging():
            self._policy.load(receiver.tensors(published), published.version)
            receiver.check(published)

    def _loaded(self) -> None:
        """Goes on with weights that have just been loaded."""


ACTION = "action"
SHOWN_TRANSITIONS = 1024
"""Transitions of a step that samples.jsonl has: some 150 bytes each."""
READ = (*SHOWN, "returns", "lengths")
LOST_EPISODES = "environment/lost_episodes"
COUNTERS = ("samples", "tokens", "running", "waiting", "aborted", LOST_EPISODES)

Finished = asyncio.Queue[Recording | EnvironmentFailed]


class ActingService(PolicyWorker, Generation):
    """Stores one row of transitions for each sample, see transitions.transition_columns."""

    def __init__(self, context: WorkerContext) -> None:
        seed = group_seed(context.config.seed, context.spec.replica) ^ context.facts.incarnation
        super().__init__(context, context.config.acting, seed)
        self._loop: ActingLoop
        self._streams: dict[SampleName, Finished] = {}  # The gate bounds their number: samples in flight.
        self._failure: EnvironmentFailed | None = None
        self._full_at = 0.0
        self.counters = dict.fromkeys(COUNTERS, 0.0)

    async def start(self) -> None:
        settings = self.context.config.acting
        context = self.context
        columns = transition_columns(self._spaces, settings.transitions)
        self.rows = context.open_rows(GateConfig.of(context.config).row_slots, bytes_of_row(columns))
        await super().start()
        self._loop = ActingLoop(
            self._policy,
            self._pool.environments,
            context.compute,
            count=settings.environments,
            transitions=settings.transitions,
            lockstep=settings.feedback == "synchronous",
            finished=self._take,
            failed=self._lost,
        )
        context.tasks.create_task(self._act(), name="acting loop")

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        """Yields the samples of a group as they are full: one of each environment whose number is a member. Raises
        Refused for a group of another incarnation, EnvironmentFailed when environments lose every episode, and
        DeadlineExceeded when no sample of any group is full in the time of one."""
        self.check_incarnation(prompts.incarnation, f"group {prompts.id}")
        began = asyncio.get_running_loop().time()
        names = [(prompts.id, member, prompts.attempt) for member in prompts.members]
        stream = Finished()
        self._streams |= dict.fromkeys(names, stream)
        try:
            if self._failure is not None:
                raise self._failure
            self._loop.record(names, prompts.not_before)
            left = len(names)
            while left:
                found = await next_items(stream, lambda: max(began, self._full_at) + prompts.longest_silence)
                if not found:
                    raise self._silent(prompts)
                left -= len(found)
                yield BatchRef(tuple(map(self._store, found)))
        finally:
            self._drop(names)

    async def pause(self) -> Boundary:
        return Boundary(ACTION, self._loop.pause(True))

    async def resume(self) -> Boundary:
        return Boundary(ACTION, self._loop.pause(False))

    async def restore_rows(self, directory: str, samples: BatchRef) -> BatchRef:
        return await self.restored_rows(directory, samples)

    async def texts(self, refs: BatchRef) -> list[SampleText]:
        """Describes samples for a person: their episodes, and up to SHOWN_TRANSITIONS transitions in all."""
        texts = list[SampleText]()
        left = SHOWN_TRANSITIONS
        for row in refs:
            if self.rows is None or (place := row.place_of("rewards")).owner != self.rows.address:
                continue
            with suppress(LostRows):
                columns = dict(zip(READ, self.rows.read(place, READ), strict=True))
                rewards, returns, lengths = (columns[name] for name in ("rewards", "returns", "lengths"))
                episodes = ", ".join(
                    f"{gained:g} after {steps} steps"
                    for gained, steps in zip(returns.tolist(), lengths.tolist(), strict=True)
                )
                text = f"{len(rewards)} transitions with a reward of {rewards.sum():g}"
                ended = f"; returns of episodes that ended: {episodes}" if episodes else ""
                shown = shown_transitions(columns, self._spaces, left)
                left -= len(shown)
                env = self.context.config.acting.env
                texts.append(SampleText(row.group, row.member, env, text + ended, transitions=shown))
        return texts

    async def _act(self) -> None:
        try:
            await self._loop.run()
        except EnvironmentFailed as failed:
            self._failure = failed
            self.context.log.error("environments failed", error=str(failed))
            for stream in self._streams.values():
                stream.put_nowait(failed)

    def _loaded(self) -> None:
        self._loop.changed()

    def _silent(self, prompts: PromptGroup) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"no sample of {self.context.spec.instance} was full within {prompts.longest_silence:g} s: it acts for "
            f"{self._loop.running} samples, {self._loop.waiting} wait, among them some of group {prompts.id}, and its "
            f"weights have version {self._policy.version}; raise generation.deadline if the environment is only slow"
        )

    def _take(self, recording: Recording) -> None:
        self._full_at = asyncio.get_running_loop().time()
        if (stream := self._streams.get(recording.name)) is not None:
            stream.put_nowait(recording)
        self._count()

    def _store(self, recording: Recording | EnvironmentFailed) -> RowRef:
        if isinstance(recording, EnvironmentFailed):
            raise recording
        columns = recording.row()
        place = self.keep(recording.name, columns)
        tokens = len(columns["rewards"])
        versions = columns["versions"]
        self.add_to_counters(samples=1, tokens=tokens)
        group, member, attempt = recording.name
        identity = (group, member, attempt, self.context.facts.incarnation)
        first = int(versions.min())
        last = int(versions.max())
        return RowRef(*identity, 0, tokens, first, last, TRANSITIONS, (place,), recording.latest)

    def _drop(self, names: Iterable[SampleName]) -> None:
        """Forgets the samples of a call that has ended; those that are not full are dropped."""
        dropped = [name for name in names if self._streams.pop(name, None) is not None]
        self._loop.drop(dropped)
        self._count()

    def _count(self) -> None:
        self._pool.queued = self._loop.waiting
        self.counters["running"] = float(self._loop.running)
        self.counters["waiting"] = float(self._loop.waiting)

    def _lost(self, place: int, why: str) -> None:
        self.counters[LOST_EPISODES] += 1
        self.context.log.warning("episode lost", environment=place, error=why)


# ---- the episodes of an evaluation ---------------------------------------------------------------------------------


HELD_OUT = -1
"""Group whose seed the episodes have: groups of training have none below 0."""
OWN_VERSION = "own_version"
PICTURE_SECONDS = 30.0
"""Time in which a child starts and draws an episode, which takes a second or two."""


class ActingEvaluationService(PolicyWorker, Generation):
    """options: `own_version`: version of the weights in the model folder, which the policy then uses at once."""

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        count = min(config.acting.environments, config.evaluate.episodes)
        settings = config.acting.model_copy(update={"environments": count})
        super().__init__(context, settings, group_seed(config.seed, HELD_OUT), share_episodes=True)
        self._are_unplayed = True
        self._may_begin_again = False
        self._playing = asyncio.Lock()
        self._pictures: EpisodePictures | None = None
        self.counters = dict.fromkeys(("samples", "tokens", LOST_EPISODES), 0.0)

    async def start(self) -> None:
        await super().start()
        if (version := self.context.spec.options.get(OWN_VERSION)) is not None:
            self._load_own(int(version))

    def _load_own(self, version: int) -> None:
        path = self.context.facts.model_dir / WEIGHTS
        acting = self.context.config.acting
        try:
            self._policy.load(load_file(path), version)
        except (OSError, KeyError, RuntimeError) as error:
            why = f"{path} holds no policy with acting.hidden_size = {list(acting.hidden_size)}"
            raise ConfigError(f"{why}: name the experiment that trained it ({error})") from error

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        """Yields the episodes as they end, each with its return as reward; one that its environment lost has none.
        Raises Refused for a group of another incarnation, PeerLost without the weights that are evaluated, and
        EnvironmentFailed when environments lose every episode."""
        context = self.context
        self.check_incarnation(prompts.incarnation, f"group {prompts.id}")
        if self._policy.version < prompts.not_before:
            raise PeerLost(
                f"{context.spec.instance} was started after the weights of version {prompts.not_before} were copied, "
                "and has none to evaluate"
            )
        async with self._playing:
            await self._begin_episodes()
            player = EpisodePlayer(self._likeliest, self._pool.environments, len(prompts.members))
            ended: list[PlayedEpisode] = []
            async for episodes in player.play(prompts.deadline):
                ended += episodes
                yield BatchRef(tuple(self._reference(prompts, each) for each in episodes))
            self._may_begin_again = True
            await self._draw(prompts.attempt, next(each for each in ended if each.number == 0))

    async def use_weights(self, published: Published) -> Using:
        return Using((), (await super().use_weights(published)).version)  # It copies weights, and holds no lease.

    async def texts(self, refs: BatchRef) -> list[SampleText]:
        """Says of the first episode why there is no picture of it, or ""; the references say everything else."""
        problem = "" if self._pictures is None else self._pictures.problem
        return [SampleText(row.group, row.member, "", problem) for row in refs if row.member == 0]

    async def stop(self) -> None:
        if self._pictures is not None:
            await self._pictures.stop()
        await super().stop()

    async def _draw(self, version: int, episode: PlayedEpisode) -> None:
        """Writes the picture of an episode into the run directory, where it stays with the episodes."""
        context = self.context
        if not context.config.evaluate.keep_answers or OWN_VERSION in context.spec.options:
            return
        if self._pictures is None:
            settings = self._pool.environments.child_settings
            self._pictures = EpisodePictures(self._settings, self._spaces, self._seed, settings)
        actions = b"".join(each.tobytes() for each in episode.actions)
        if (picture := await self._pictures.draw(actions, PICTURE_SECONDS)) is not None:
            path = RunDirectory(context.facts.run_dir).answers / f"{version}.gif"
            await asyncio.to_thread(replace_bytes, path, picture)

    async def _begin_episodes(self) -> None:
        """Begins the first episode in each environment, in new ones where those before cannot go back to theirs."""
        may_begin_again = self._may_begin_again
        self._may_begin_again = False
        if self._are_unplayed:
            self._are_unplayed = False
            return
        if may_begin_again and await self._pool.environments.begin_again():
            return
        await self._pool.stop()
        self._pool.environments = self._new_environments()
        await self._pool.start()

    async def _likeliest(self, states: Floats) -> Floats:
        _, _, actions = await self.context.compute.run(partial(self._policy.act, greedy=True), states)
        return actions

    def _reference(self, prompts: PromptGroup, episode: PlayedEpisode) -> RowRef:
        self.add_to_counters(samples=1, tokens=episode.steps)
        if episode.end == LOST:
            self.add_to_counters(**{LOST_EPISODES: 1})
            self.context.log.warning("episode of an evaluation lost", episode=episode.number, error=episode.error)
        identity = (prompts.id, prompts.members[episode.number], prompts.attempt, prompts.incarnation)
        version = self._policy.version
        gained = None if episode.end == LOST else episode.gained
        return RowRef(*identity, 0, episode.steps, version, version, episode.end, (), gained)
