"""The generation service: samples groups while new weights arrive.

    generate ── requests ──┐                          ┌── finished samples ── rows ── reference to the caller
    use_weights ── flip ───┼── compute thread, in turn ┤
                           └── slices of decode steps ─┘      (engines/generation/slices.py)

Whatever touches the engine runs on the compute thread, so a flip falls between two decode steps by itself.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import numpy as np

from asyncrl.config import Config
from asyncrl.context import Room
from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.generation.interface import NO_WEIGHTS, Completion, GenerationEngine, Key, Request
from asyncrl.engines.generation.slices import Slices
from asyncrl.engines.generation.torch import EngineSettings, TorchEngine
from asyncrl.errors import DeadlineExceeded, LostRows, Refused, TaskError
from asyncrl.groups import GateConfig
from asyncrl.mismatch import apart
from asyncrl.prompt_lengths import refuse_what_has_no_room
from asyncrl.protocols.batch import BatchRef, Place, RowRef
from asyncrl.protocols.contracts import Generation
from asyncrl.protocols.messages import Boundary, PromptGroup, Published, SampleText, Using
from asyncrl.protocols.seeds import member_seed
from asyncrl.rows import bytes_of_slot
from asyncrl.service import Service, WorkerContext
from asyncrl.weights.arena import Reader, open_reader
from asyncrl.weights.session import must_flip

EVALUATION = "evaluation"
"""Name of the service that samples held-out prompts: it copies the version it is told to use, and leases none."""

Stream = asyncio.Queue[Completion]


class GenerationService(Service, Generation):
    """options: `own_version`: the version of the model folder's weights, which are then used from the start.
    `longest_prompts`: a file of prompts whose tokens are counted before anything is sampled (see prompt_lengths)."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._evaluates = context.service == EVALUATION
        self._streams: dict[Key, Stream] = {}  # bounded by the gate: the samples in flight
        self._aborted: list[Key] = []
        self._wake = asyncio.Event()
        self._flipping = asyncio.Lock()
        self._published: Published | None = None
        self._reader: Reader | None = None
        self._apart: float | None = None
        self.counters = dict.fromkeys(("samples", "tokens", "aborted", "running", "waiting"), 0.0)

    async def start(self) -> None:
        context = self.context
        self._engine: GenerationEngine = await context.compute.run(self._load_engine)
        config = context.config
        self._room = Room(config.task.max_prompt_tokens, config.generation.max_new_tokens, self._engine.context)
        if longest := context.options.get("longest_prompts"):
            await context.compute.run(refuse_what_has_no_room, Path(longest), self._engine.tokenize, self._room)
        self._slices = Slices(self._engine, lambda: context.compute.queued > 1)
        self.rows = context.open_rows(_row_slots(context.config, self._evaluates), self._row_bytes())
        context.tasks.create_task(self._decode(), name="decode loop")

    async def stop(self) -> None:
        if self._reader is not None:
            self._reader.close()
        await super().stop()

    # ---- endpoints ---------------------------------------------------------------------------------------

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        """Samples as they finish, one row each; columns prompt_ids, response_ids, versions (int32), logprobs
        (float32) and text (uint8, UTF-8, cut before a stop string). At the group's deadline what runs ends as `length`.

        Raises:
            Refused: the group is of another epoch.
            TaskError: the prompt has no tokens, too many of them, or cannot be rendered.
            DeadlineExceeded: some members had not even begun at the deadline.
        """
        self._check_epoch(prompts.epoch, f"group {prompts.id}")
        until = asyncio.get_running_loop().time() + prompts.deadline
        stream = Stream()
        requests = await self.context.compute.run(self._requests, prompts)
        keys = [request.key for request in requests]
        self._streams |= dict.fromkeys(keys, stream)
        try:
            await self.context.compute.run(self._submit, requests)
            self._wake.set()
            left = len(keys)
            while left:
                finished = await self._next(stream, keys, until)
                left -= len(finished)
                yield BatchRef(tuple(self._stored(done) for done in finished))
        finally:
            self._abort(keys)

    async def use_weights(self, published: Published) -> Using:
        self._check_epoch(published.epoch, f"version {published.version}")
        if not published.is_kept_for(self.context.instance):
            return Using((), published.version)
        async with self._flipping:
            if must_flip(self._published, published):
                await self.context.compute.run(self._flip, published)
                self._published = published
                self._wake.set()
        return Using(() if self._evaluates else (self.context.instance,), self._engine.version, self._apart)

    async def pause(self) -> Boundary:
        return Boundary("decode step", self._slices.pause())

    async def resume(self) -> Boundary:
        boundary = Boundary("decode step", self._slices.resume())
        self._wake.set()
        return boundary

    async def texts(self, refs: BatchRef) -> list[SampleText]:
        found = []
        for row in refs:
            if (columns := self._read(row)) is not None:
                prompt = await self.context.compute.run(self._engine.decode, columns[0])
                found.append(SampleText(row.group, row.member, prompt, bytes(columns[1]).decode()))
        return found

    # ---- samples -----------------------------------------------------------------------------------------

    def _requests(self, prompts: PromptGroup) -> list[Request]:
        ids = self._engine.tokenize(prompts.prompt)
        if mistake := self._room.mistake(len(ids)):
            raise TaskError(mistake)
        return [
            Request(
                key=(prompts.id, member, prompts.attempt),
                prompt=ids,
                seed=member_seed(prompts.seed, member),
                temperature=prompts.temperature,
                max_new_tokens=prompts.max_new_tokens,
                not_before=prompts.not_before,
            )
            for member in prompts.members
        ]

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._engine.submit(request)

    async def _next(self, stream: Stream, keys: Sequence[Key], until: float) -> list[Completion]:
        """Those of these that finished since the last; at the deadline all that run finish."""
        try:
            async with asyncio.timeout_at(until):
                return [await stream.get(), *_taken(stream)]
        except TimeoutError:
            open_keys = [key for key in keys if key in self._streams]
            self._deliver(await self.context.compute.run(self._engine.end, open_keys, "length"))
        if stream.empty():
            raise DeadlineExceeded(self._late([key for key in keys if key in self._streams]))
        return _taken(stream)

    def _late(self, keys: Sequence[Key]) -> str:
        engine, members = self._engine, ", ".join(str(member) for _, member, _ in keys)
        version = "none yet" if engine.version == NO_WEIGHTS else engine.version
        return (
            f"members {members} of group {keys[0][0]} had not begun at their deadline: {self.context.instance} runs "
            f"{engine.running} samples, {engine.waiting} wait, its weights are of version {version}"
        )

    def _stored(self, done: Completion) -> RowRef:
        group, member, attempt = done.request.key
        place = self.keep(
            done.request.key,
            {
                "prompt_ids": done.request.prompt,
                "response_ids": done.tokens,
                "logprobs": done.logprobs,
                "versions": done.versions,
                "text": np.frombuffer(done.text.encode(), np.uint8),
            },
        )
        self.context.tracer.flow_start(f"sample {group}.{member}.{attempt}")
        return self._row(done, place)

    def _row(self, done: Completion, place: Place) -> RowRef:
        group, member, attempt = done.request.key
        return RowRef(
            group=group,
            member=member,
            attempt=attempt,
            epoch=self.context.epoch,
            prompt_tokens=len(done.request.prompt),
            tokens=len(done.tokens),
            first=int(done.versions[0]),
            last=int(done.versions[-1]),
            finish=done.finish,
            places=(place,),
        )

    def _abort(self, keys: Iterable[Key]) -> None:
        """End those that nobody waits for any more, at the next decode step."""
        open_keys = [key for key in keys if self._streams.pop(key, None) is not None]
        self._aborted += open_keys
        self.counters["aborted"] += len(open_keys)
        if open_keys:
            self._wake.set()

    # ---- decoding ----------------------------------------------------------------------------------------

    async def _decode(self) -> None:
        """For ever: slices of decode steps while there is something to sample."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            more = True
            while self._aborted or (more and not self._slices.paused):
                aborted, self._aborted = self._aborted, []
                done, more = await self.context.compute.run(self._slices.run, aborted)
                self._deliver(done)
                await asyncio.sleep(0)  # callers get their samples also where computing is done on this very loop
            self.context.clock.idle()

    def _deliver(self, completions: Iterable[Completion]) -> None:
        for done in completions:
            if (stream := self._streams.pop(done.request.key, None)) is not None:
                stream.put_nowait(done)
                self.counters["samples"] += 1
                self.counters["tokens"] += len(done.tokens)
        self.counters |= {"running": self._engine.running, "waiting": self._engine.waiting}

    # ---- weights and rows --------------------------------------------------------------------------------

    def _load_engine(self) -> TorchEngine:
        refuse_unusable("generation.device", self.context.config.generation.device)
        version = self.context.options.get("own_version", NO_WEIGHTS)
        return TorchEngine(self.context.model_dir, EngineSettings.of(self.context.config), version)

    def _flip(self, published: Published) -> None:
        """On the CPU a following engine reads the arena in place; others copy."""
        with self.context.clock.state("sync"), self.context.tracer.span("flip", version=published.version):
            if self._reader is None:
                self._reader = open_reader(published, self._engine.spec)
            tensors = self._reader.tensors(published)
            share = not self._evaluates and self.context.config.generation.device == "cpu"
            self._engine.load(tensors, published.version, share=share)
            self._reader.check(published)
        if published.canary is not None and not self._evaluates:
            found = self._engine.logprobs_after(np.array(published.canary.prompt))
            self._apart = apart(published.canary, found)

    def _check_epoch(self, epoch: int, what: str) -> None:
        if epoch != self.context.epoch:
            raise Refused(f"{what} is of epoch {epoch}; {self.context.instance} is of epoch {self.context.epoch}")

    def _read(self, row: RowRef) -> list[np.ndarray] | None:
        """Prompt and text of a row that lies here."""
        place = row.place_of("text")
        if self.rows is None or place.owner != self.rows.address:
            return None
        try:
            return self.rows.read(place, ["prompt_ids", "text"])
        except LostRows:
            return None

    def _row_bytes(self) -> int:
        config = self.context.config
        prompt, response = config.task.max_prompt_tokens, config.generation.max_new_tokens
        ids, numbers, letters = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint8)
        return bytes_of_slot(
            {
                "prompt_ids": (ids, prompt),
                "response_ids": (ids, response),
                "logprobs": (numbers, response),
                "versions": (ids, response),
                "text": (letters, response * self._engine.token_bytes),
            }
        )


def _taken(stream: Stream) -> list[Completion]:
    """What lies in the stream now."""
    return [stream.get_nowait() for _ in range(stream.qsize())]


def _row_slots(config: Config, evaluates: bool) -> int:
    """Evaluation asks for no more groups than it has slots for, and at least one."""
    if evaluates:
        return max(config.generation.slots, config.evaluate.samples)
    return GateConfig.of(config).row_slots
