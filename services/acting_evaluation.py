"""Plays the episodes of an evaluation: the evaluation service of a run with `acting.env`.

A group is all episodes of one evaluation, its members are their numbers. The same number has the same seed in each
evaluation. The policy does not explore. No rows are stored: the references say how each episode ended.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from safetensors.torch import load_file

from asyncrl.engines.acting.acting_trainer import WEIGHTS
from asyncrl.engines.acting.episode_player import LOST, EpisodePlayer, PlayedEpisode
from asyncrl.engines.acting.stepping.answers import Floats
from asyncrl.engines.acting.stepping.picture_child import EpisodePictures
from asyncrl.errors import ConfigError, PeerLost
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.messages import PromptGroup, Published, SampleText, Using
from asyncrl.protocols.seeds import group_seed
from asyncrl.protocols.service_contracts import Generation
from asyncrl.services.acting_generation import PolicyWorker
from asyncrl.telemetry.run_directory import RunDirectory, replace_bytes

HELD_OUT = -1
"""Group whose seed the episodes have: groups of training have none below 0."""
COUNTERS = ("samples", "tokens", "environment/lost_episodes")
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
        self.counters = dict.fromkeys(COUNTERS, 0.0)

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
            self.add_to_counters(**{"environment/lost_episodes": 1})
            self.context.log.warning("episode of an evaluation lost", episode=episode.number, error=episode.error)
        identity = (prompts.id, prompts.members[episode.number], prompts.attempt, prompts.incarnation)
        version = self._policy.version
        gained = None if episode.end == LOST else episode.gained
        return RowRef(*identity, 0, episode.steps, version, version, episode.end, (), gained)
