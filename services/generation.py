"""Samples groups of completions while new weights arrive.

    generate ── requests ──┐        ┌── finished samples ── rows ── reference to the caller
    use_weights ── update ─┼ engine ┤
    pause, resume ─────────┘        └── load ── counters of health

The service has calls, rows and streams; the engine (engines/generation/engine_interface.py) has everything else, and
changes its weights between two decode steps.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from asyncrl.concurrency import next_items
from asyncrl.config.gate_config import GateConfig
from asyncrl.engines.canary_logprobs import canary_distance
from asyncrl.engines.generation.engine_interface import NO_WEIGHTS, Completion, GenerationEngine, Key
from asyncrl.engines.generation.ranked_generation import FollowingGeneration, LeadingEngine
from asyncrl.engines.generation.torch_engine import StoredSampleEngine
from asyncrl.engines.generation.torch_generation import TorchGeneration
from asyncrl.engines.generation.turn_requests import ROW, Trajectory, Turn, TurnRequests
from asyncrl.engines.generation.vllm.vllm_generation import VllmGeneration
from asyncrl.engines.models.model_families import recorded_columns
from asyncrl.engines.models.prompt_pictures import GroupPictures
from asyncrl.engines.ranks.rank_mesh import Announcements
from asyncrl.environments.loading import answer_role
from asyncrl.environments.transcript import unfinished_in
from asyncrl.errors import DeadlineExceeded, LostRows, PeerLost, Refused, TaskError
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.data.row_store import bytes_of_row
from asyncrl.lanes.weights.leases import must_flip
from asyncrl.protocols.batch import (
    CUT,
    EXPERTS,
    LATE,
    SPANS,
    Array,
    BatchRef,
    RowRef,
    SampleName,
    restored_columns,
    sampled_places,
    trajectory_columns,
)
from asyncrl.protocols.messages import Boundary, PromptGroup, Published, SampleText, Using
from asyncrl.protocols.service_contracts import Generation
from asyncrl.services.ranks import death_noticed, end_announcements, find_meeting, next_announced, open_mesh_beside
from asyncrl.tasks.prompt_lengths import TokenBudget, refuse_what_has_no_room

# ---- ranks that sample together, in the processes of the trainer: one leads, the others follow it ------------------
#
#     controller ── generate ──> rank 0 ── announces each call ──> rank 1
#                                   └──── states and sums of layers ─┘


class SamplingGroup:
    """Connects one rank with the others of its replica. engine: of this rank, which its worker runs. follows: whether
    another rank leads."""

    def __init__(
        self, announcements: Announcements, engine: TorchGeneration | FollowingGeneration, *, follows: bool
    ) -> None:
        self.engine = engine
        self.follows = follows
        self._announcements = announcements

    @classmethod
    async def open(cls, context: WorkerContext) -> "SamplingGroup":
        """Connects the ranks and loads the engine of this one. Raises PeerLost when another rank did not start, and
        ConfigError for a model that ranks cannot share out."""
        mesh = await context.compute.run(open_mesh_beside, context, await find_meeting(context))
        announcements = mesh.announcements
        assert announcements is not None, "rank 0 announces what all of them compute"
        if mesh.rank > 0:
            calls = partial(next_announced, announcements)
            timeout = context.config.fleet.call_deadline
            follower = await FollowingGeneration.open(context, ranks=mesh, calls=calls, timeout=timeout)
            return cls(announcements, follower, follows=True)
        engine = partial(LeadingEngine, ranks=mesh, tell=announcements.tell)
        return cls(announcements, await TorchGeneration.open(context, copies=False, engine=engine), follows=False)

    async def run(self, deliver: Callable[[Sequence[Completion]], None]) -> None:
        """Samples until cancelled. Raises PeerLost."""
        async with death_noticed():
            await self.engine.run(deliver)

    async def stop(self) -> None:
        await end_announcements(self._announcements)


EVALUATION = "evaluation"  # samples held-out prompts: copies the version under evaluation and holds no lease
STEP = "decode step"

JSON_BYTES = 6
"""Most bytes of JSON that one byte of text becomes."""

SHOWN = ("text", "prompt_ids", "response_ids", "logprobs", "versions")
SHOWN_OF_EPISODES = ("transcript", "turn_rewards", SPANS)
"""Columns of a sample that a person is shown."""

COUNTERS = ("samples", "tokens", "aborted", "running", "waiting", "cache_used", "preemptions")

OTHER_ENGINES = {"vllm": VllmGeneration}
"""Engines that are not asyncrl's own, by the values of `generation.engine`."""

CompletionQueue = asyncio.Queue[Completion]
OwnEngine = TorchGeneration | FollowingGeneration
"""An engine that samples with weights of the trainer's rank in this process."""


class GenerationService(Service, Generation):
    """Samples groups with an engine of its own. options: `own_version`: version of the weights in the model folder,
    which the engine then uses at once. `adapters`: folder of the adapters of that version, in a run with `model.lora`.
    `longest_prompts`: prompts that are checked at the start (see prompt_lengths).
    """

    renews = True

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._evaluates = context.spec.service == EVALUATION
        self._streams: dict[Key, CompletionQueue] = {}  # The gate bounds their number: samples in flight.
        self._weights_lock = asyncio.Lock()
        self._closing = ExitStack()
        self._delivered_at = 0.0
        self._published: Published | None = None
        self._canary_distance: float | None = None
        self._pictures = GroupPictures()
        self._group: SamplingGroup | None = None  # Ranks that sample together, this one among them.
        self.counters = dict.fromkeys(COUNTERS, 0.0)

    async def start(self) -> None:
        context = self.context
        self._engine = await self._open_engine()
        self._closing.callback(self._engine.close)
        config = context.config
        tokenizer = self._engine.tokenizer
        prompt = config.task.max_prompt_tokens
        response = config.response_tokens
        episodes = bool(config.environment.use)
        key = "environment.max_tokens" if episodes else "generation.max_new_tokens"
        budget = TokenBudget(prompt, response, self._engine.context, key)
        renderer, max_turns = (self._engine.turns, config.environment.max_turns) if episodes else (None, 1)
        by_template = config.environment.thoughts == "template"
        self._turns = TurnRequests(tokenizer, renderer, budget, max_turns, by_template)
        if prompts := context.spec.options.get("longest_prompts"):
            answered = partial(self._engine.turns.prompt_ids, role=answer_role(config.environment))
            prompt_ids = answered if episodes else tokenizer.prompt_ids
            await context.compute.run(refuse_what_has_no_room, Path(prompts), prompt_ids, budget)
        if not self._follows:
            self._open_rows()
        run = self._engine.run if self._group is None else self._group.run
        context.tasks.create_task(run(self._deliver), name="decode loop")

    def _open_rows(self) -> None:
        """Opens the store of samples, for the longest ones."""
        context = self.context
        config = self.context.config
        tokenizer = self._engine.tokenizer
        prompt = config.task.max_prompt_tokens
        response = config.response_tokens
        # One group of the run at least, and as many groups as an evaluation samples at a time.
        evaluation_slots = max(config.generation.slots, config.evaluate.most_samples)
        # And one more, because the row of a turn is stored before that of the turn before is freed.
        slots = evaluation_slots + 1 if self._evaluates else GateConfig.of(config).row_slots
        text = response * tokenizer.longest_token_bytes()
        longest = restored_columns(prompt, response, text)
        longest |= recorded_columns(config, context.facts.model_dir, prompt + response)
        if config.environment.use:
            said = text + config.environment.max_turns * config.environment.max_bytes
            longest |= trajectory_columns(config.environment.max_turns, JSON_BYTES * said)
        pictures = tokenizer.picture_columns(prompt)  # A row of them for each group; a restored sample has its own.
        slots += -(-slots // config.task.samples_per_prompt) if pictures else 0
        self.rows = context.open_rows(slots, bytes_of_row(longest | pictures))

    async def stop(self) -> None:
        if self._group is not None:
            await self._group.stop()
        self._closing.close()
        await super().stop()

    async def renew(self, facts: RunFacts) -> None:
        """Keeps the engine, and has it wait for the weights of a new trainer."""
        if not isinstance(self._engine, TorchGeneration) or self.context.config.environment.use:
            raise Refused(f"{self.context.spec.instance} keeps more of its samples than it can forget")
        await super().renew(facts)
        async with self._weights_lock:
            await self._engine.begin_again()
            self._published = self._canary_distance = None
            self._pictures = GroupPictures()

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        """Yields samples as they finish, one row each: columns prompt_ids, response_ids, versions (int32), logprobs
        (float32) and text (uint8, UTF-8, cut before a stop string). A sample that holds a slot for the deadline of the
        group ends as `length`. In an experiment with an environment each sample is a turn, its row has the turns so far
        (turn_requests.py), and what has no room for another turn comes back as it was, with the finish reason
        `token_limit`.

        Raises Refused for a group of another incarnation, TaskError for a prompt without tokens, with too many, or that
        cannot be rendered, and DeadlineExceeded when no sample of any group finishes in that time.
        """
        self.check_incarnation(prompts.incarnation, f"group {prompts.id}")
        if self._evaluates and self._engine.version < prompts.not_before:
            raise PeerLost(
                f"{self.context.spec.instance} was started after the weights of version {prompts.not_before} were "
                "copied, and has none to evaluate"
            )
        began = asyncio.get_running_loop().time()
        stream = CompletionQueue()
        turns, ended = await self._requested(prompts)
        if ended:
            yield BatchRef(tuple(ended))
        if turns and not self._evaluates:
            assert self.rows is not None, "`start` opens them"
            self._pictures.add(self.rows, prompts, turns[0].request.pictures)
        before = {turn.request.key: turn.before for turn in turns}
        keys = list(before)
        self._streams |= dict.fromkeys(keys, stream)
        try:
            await self._engine.submit([turn.request for turn in turns])
            left = len(keys)
            while left:
                finished = await self._next_completions(stream, keys, began, prompts.longest_silence)
                left -= len(finished)
                most = prompts.max_new_tokens
                yield BatchRef(tuple(self._store(each, before[each.request.key], most) for each in finished))
        finally:
            self._abort(keys, stream)

    async def release(self, samples: list[SampleName], oldest: int) -> None:
        await super().release(samples, oldest)
        if self.rows is not None:
            self.rows.free(self._pictures.release(samples, oldest))
        if self.context.config.environment.use:
            self._engine.forget(samples, oldest)

    async def use_weights(self, published: Published) -> Using:
        self.check_incarnation(published.incarnation, f"version {published.version}")
        if not published.is_kept_for(self.context.spec.instance):
            return Using((), published.version)
        async with self._weights_lock:
            if must_flip(self._published, published):
                await self._engine.update(published)
                if published.canary is not None and not self._evaluates and not self._follows:
                    logprobs = await self._engine.logprobs_after(np.array(published.canary.prompt))
                    self._canary_distance = canary_distance(published.canary, logprobs)
                self._published = published
        return Using(
            () if self._evaluates else (self.context.spec.instance,), self._engine.version, self._canary_distance
        )

    @property
    def weights_version(self) -> int | None:
        engine: GenerationEngine | None = getattr(self, "_engine", None)  # `start` sets it; health comes earlier.
        return None if engine is None or engine.version == NO_WEIGHTS else engine.version

    @property
    def unprofiled_because(self) -> str:
        engine = self.context.config.generation.engine_facts
        return super().unprofiled_because if engine.is_own else f"{engine.title} computes in processes of its own"

    async def pause(self) -> Boundary:
        return Boundary(STEP, await self._engine.pause())

    async def resume(self) -> Boundary:
        return Boundary(STEP, await self._engine.resume())

    async def restore_rows(self, directory: str, samples: BatchRef) -> BatchRef:
        return BatchRef(()) if self._follows else await self.restored_rows(directory, samples)

    async def texts(self, refs: BatchRef) -> list[SampleText]:
        texts = []
        for row in refs:
            with suppress(LostRows):
                if columns := await self._shown_columns(row):
                    texts.append(await self._text(row, columns))
        return texts

    async def _shown_columns(self, row: RowRef) -> dict[str, Array]:
        """Returns the columns of a sample that a person is shown; none if another worker has them. Those of an episode
        are its environment's. Raises LostRows for a sample that is gone."""
        episodes = bool(self.context.config.environment.use)
        names = [*SHOWN, *(SHOWN_OF_EPISODES if episodes else ())]
        place = row.place_of(SHOWN[0])
        if self.rows is not None and place.owner == self.rows.address:
            return dict(zip(names, self.rows.read(place, names), strict=True))
        if not episodes:
            return {}
        found = await self.context.reader.read(BatchRef((row,)), names)
        return {name: found[name][0] for name in names}

    async def _text(self, row: RowRef, columns: Mapping[str, Array]) -> SampleText:
        prompt = await self.context.compute.run(self._engine.tokenizer.decode, columns["prompt_ids"])
        ids = columns["response_ids"]
        sampled = ids[sampled_places(columns[SPANS])] if SPANS in columns else ids
        text = SampleText(
            row.group,
            row.member,
            prompt,
            bytes(columns["text"]).decode(),
            prompt_ids=tuple(columns["prompt_ids"].tolist()),
            token_ids=tuple(sampled.tolist()),
            token_logprobs=tuple(round(value, 6) for value in columns["logprobs"].tolist()),
            token_versions=tuple(columns["versions"].tolist()),
        )
        if "transcript" not in columns:
            return text
        turns = json.loads(bytes(columns["transcript"]))
        rewards = tuple(columns["turn_rewards"].tolist())
        decode = partial(self._engine.tokenizer.decode, skip_special_tokens=False)
        played = Trajectory.of_row(columns)
        seen = played.context_of(played.turns)[: -int(played.spans[-2])]
        context = await self.context.compute.run(decode, seen)
        return replace(text, turns=turns, turn_rewards=rewards, context=context)

    async def _requested(self, prompts: PromptGroup) -> tuple[list[Turn], list[RowRef]]:
        """Returns the turns that a call asks for, and samples that have no room for one."""
        if prompts.continues is None:
            return await self.context.compute.run(self._turns.first, prompts), []
        rows = [row for row in prompts.continues if row.member in prompts.members]
        if missing := set(prompts.members) - {row.member for row in rows}:
            group = f"group {prompts.id}"
            raise TaskError(f"{group}, member {min(missing)} is to go on, but `continues` has no row of this member")
        columns = [*ROW, EXPERTS] if self.context.config.training.router_replay else ROW
        read = await self.context.reader.read(BatchRef(tuple(rows)), columns)
        return await self.context.compute.run(self._turns.later, prompts, rows, read)

    async def _next_completions(
        self, stream: CompletionQueue, keys: Sequence[Key], began: float, silence: float
    ) -> list[Completion]:
        """Waits for finished samples of these keys, as long as samples finish: each does by its deadline."""
        if finished := await next_items(stream, lambda: max(began, self._delivered_at) + silence):
            return finished
        load = self._engine.load()
        own = self.context.spec.instance
        members = ", ".join(str(key[1]) for key in keys if key in self._streams)
        version = "none yet" if self._engine.version == NO_WEIGHTS else self._engine.version
        raise DeadlineExceeded(
            f"no sample of {own} finished within {silence:g} s: it runs {load.running} samples, {load.waiting} "
            f"wait, among them members {members} of group {keys[0][0]}, and its weights have version {version}"
        )

    def _store(self, completion: Completion, before: Trajectory | None, most: int) -> RowRef:
        """Stores a sample, or the turns before with the one that was sampled, and frees the row of those turns. most:
        tokens of an answer."""
        request = completion.request
        group, member, attempt = request.key
        unfinished = completion.unfinished_by(most)
        after = None if before is None else before.with_answer(completion, unfinished)
        columns = _columns(completion) if after is None else after.columns()
        place = self.keep(request.key, columns)
        self.context.tracer.flow_start(f"sample {group}.{member}.{attempt}")
        prompt = columns["prompt_ids"]
        versions = columns["versions"]
        prompt_tokens = len(prompt)
        tokens = len(versions)
        first = int(versions[0])
        last = int(versions[-1])
        identity = (group, member, attempt, self.context.facts.incarnation)
        places = (place, *self._pictures.places(group))
        row = RowRef(*identity, prompt_tokens, tokens, first, last, completion.finish, places, opened=request.opened)
        if after is None:
            return row._replace(cut=int(unfinished == CUT), late=int(unfinished == LATE))
        cut, late = unfinished_in(after.transcript)
        return row._replace(turns=after.turns, given=after.given, cut=cut, late=late)

    def _abort(self, keys: Iterable[Key], stream: CompletionQueue) -> None:
        """Ends the open samples of a call at the next decode step. The next turn of one that has finished may run in
        another call by now, which goes on."""
        open_keys = [key for key in keys if self._streams.get(key) is stream]
        for key in open_keys:
            del self._streams[key]
        self.counters["aborted"] += len(open_keys)
        if open_keys:
            self._engine.abort(open_keys)

    def _deliver(self, completions: Sequence[Completion]) -> None:
        if completions:
            self._delivered_at = asyncio.get_running_loop().time()
        for completion in completions:
            if (stream := self._streams.pop(completion.request.key, None)) is not None:
                stream.put_nowait(completion)
                self.add_to_counters(samples=1, tokens=len(completion.tokens))
        load = self._engine.load()
        self.counters |= {"running": load.running, "waiting": load.waiting}
        self.counters |= {"cache_used": load.cache_used, "preemptions": load.preemptions}
        if self._turns.max_turns > 1:
            self.counters |= {"parked_hits": load.parked_hits, "parked_misses": load.parked_misses}

    async def _open_engine(self) -> GenerationEngine:
        """Loads the engine of the experiment. An evaluation copies its weights, because it holds no lease."""
        if (other := OTHER_ENGINES.get(self.context.config.generation.engine)) is not None:
            return await other.open(self.context)
        if self.context.config.generation.stored_samples and not self._evaluates:
            return await TorchGeneration.open(self.context, copies=False, engine=StoredSampleEngine)
        if self.context.spec.layout.size > 1:
            self._group = await SamplingGroup.open(self.context)
        engine = (
            await TorchGeneration.open(self.context, copies=self._evaluates)
            if self._group is None
            else self._group.engine
        )
        if (handover := self.context.handover) is not None:
            put_away = engine.put_away if self._follows else partial(self._put_away, engine)
            handover.attach(partial(self._restore, engine), put_away, waits=self._follows)
        return engine

    @property
    def _follows(self) -> bool:
        """Returns whether this rank samples what the first of its group says, and takes no requests."""
        return self._group is not None and self._group.follows

    async def _restore(self, engine: OwnEngine, version: int) -> None:
        """Goes on with the weights that the engine had before a step of the trainer in this process."""
        async with self._weights_lock:
            await engine.load_own(version)

    async def _put_away(self, engine: OwnEngine) -> None:
        """Frees the engine's memory for a step of the trainer in this process."""
        async with self._weights_lock:
            await engine.put_away()


def _columns(completion: Completion) -> dict[str, Array]:
    columns: dict[str, Array] = {
        "prompt_ids": completion.request.prompt,
        "response_ids": completion.tokens,
        "logprobs": completion.logprobs,
        "versions": completion.versions,
        "text": np.frombuffer(completion.text.encode(), np.uint8),
    }
    return columns if completion.experts is None else columns | {EXPERTS: completion.experts.reshape(-1)}
