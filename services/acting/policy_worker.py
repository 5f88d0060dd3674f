"""The base of services with a policy that acts, and environments in children that can be killed."""

import asyncio
from functools import partial

from asyncrl.config.sections.environment_config import ActingConfig
from asyncrl.engines.acting.acting_policy import NO_WEIGHTS, ActingPolicy
from asyncrl.engines.acting.stepping.spaces import read_spaces
from asyncrl.engines.acting.stepping.stepped_environments import SteppedEnvironments
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.fleet.worker.weight_endpoints import weight_network
from asyncrl.lanes.weights.leases import must_flip
from asyncrl.lanes.weights.selection.transport_opening import open_receiver
from asyncrl.lanes.weights.transports.interface import WeightReceiver
from asyncrl.protocols.messages import Published, Using
from asyncrl.services.pooled_service import PooledService
from asyncrl.telemetry.run_directory import RunDirectory


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


class PolicyWorker(PooledService[ActingPool]):
    """Takes published weights into its policy. settings: of its environments. seed: of their episodes. share_episodes:
    as in SteppedEnvironments."""

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
            self._receiver = open_receiver(published, self._policy.spec, partial(weight_network, context), "cpu")
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
