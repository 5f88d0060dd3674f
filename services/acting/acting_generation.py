"""Acts in environments with the policy while new weights arrive: the generation service of a run with `acting.env`.

    generate ── recordings ──┐        ┌── full recordings ── rows ── reference to the caller
    use_weights ── weights ──┼ loop ──┤
    pause, resume ───────────┘        └── environments in children that can be killed

A group is one sample of each environment. Episodes go on from sample to sample, so what a sample has depends on those
before it: a group that is tried again has other transitions.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

from asyncrl.concurrency import next_items
from asyncrl.config.gate_config import GateConfig
from asyncrl.engines.acting.acting_loop import ActingLoop, Recording
from asyncrl.engines.acting.transitions import transition_columns
from asyncrl.errors import DeadlineExceeded, EnvironmentFailed, LostRows
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.data.row_store import bytes_of_row
from asyncrl.protocols.batch import BatchRef, RowRef, SampleName
from asyncrl.protocols.messages import Boundary, PromptGroup, SampleText
from asyncrl.protocols.seeds import group_seed
from asyncrl.protocols.service_contracts import Generation
from asyncrl.services.acting.policy_worker import PolicyWorker
from asyncrl.services.acting.shown_transitions import SHOWN, shown_transitions
from asyncrl.telemetry.samples_file import TRANSITIONS

ACTION = "action"
SHOWN_TRANSITIONS = 1024
"""Transitions of a step that samples.jsonl has: some 150 bytes each."""
READ = (*SHOWN, "returns", "lengths")
COUNTERS = ("samples", "tokens", "running", "waiting", "aborted", "environment/lost_episodes")

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
        self.counters["environment/lost_episodes"] += 1
        self.context.log.warning("episode lost", environment=place, error=why)
