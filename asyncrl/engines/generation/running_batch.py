"""The running batch: a table of the samples in slots, and who of them gets the blocks of the KV cache.

Row i is slot i, and used rows are always the first ones.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation.block_pool import KV_BLOCK, BlockTables, Ints, KeptBlocks, blocks_for
from asyncrl.engines.generation.engine_interface import Completion, Finish, Key, SampleRequest
from asyncrl.engines.models.model_families import RecordShape
from asyncrl.protocols.seeds import draws

Experts = NDArray[Any]
"""Numbers of experts [tokens, routers x k], see RecordShape."""
Recall = Callable[[Ints, Ints], Experts]
"""Returns the experts of positions (second) of slots (first), as the cache holds them now."""


class SampleExperts:
    """Holds one entry per slot."""

    def __init__(self, slots: int, max_new_tokens: int, shape: RecordShape) -> None:
        self._shape = shape
        self._sampled = np.zeros((slots, max_new_tokens, shape.width), shape.dtype)
        self._prompts: list[Experts] = [self._nothing(0)] * slots

    def note(self, rows: Ints, prompts: Ints, sampled: Ints, recall: Recall) -> None:
        """Notes the experts of the newest computed token of these rows, of whose next one is sampled now. prompts,
        sampled: tokens of each row before."""
        for row, length in zip(rows[sampled == 0].tolist(), prompts[sampled == 0].tolist(), strict=True):
            self._prompts[row] = recall(np.full(length - 1, row), np.arange(length - 1))
        self._sampled[rows, sampled] = recall(rows, prompts + sampled - 1)

    def move(self, source: int, row: int) -> None:
        self._sampled[row] = self._sampled[source]
        self._prompts[row] = self._prompts[source]

    def of(self, row: int, prompt: int, sampled: int) -> Experts:
        """Returns the experts of a row with so many tokens, with NONE for the newest."""
        if not sampled:
            return self._nothing(prompt)
        return np.concatenate([self._prompts[row], self._sampled[row, :sampled], self._nothing(1)])

    def _nothing(self, tokens: int) -> Experts:
        return np.full((tokens, self._shape.width), self._shape.none, self._shape.dtype)


class RunningBatch:
    """Holds one array per column, each with one entry per slot. sampled: number of sampled tokens. drawn: of earlier
    turns. cached: whether the KV cache holds all tokens of the row but the newest. held: of a row that is not cached,
    the first tokens that the KV cache holds. interrupted: how often new weights discarded these before the row was
    cached. age: rows are numbered as they start. prompts: key of each prompt, by which rows share it.

    The deadline of a row runs from its start on, but not while the row waits for blocks after it lost its own. ends_at:
    when it is over, in seconds of `clock`; inf while it stands still. left: the seconds that were left then.

    record: of the experts of each token; None keeps none. Used rows are always the first ones: the last row takes the
    place of one that ends. TorchEngine and BlockMemory alone change the columns."""

    def __init__(
        self,
        slots: int,
        max_new_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        record: RecordShape | None = None,
    ) -> None:
        self.clock = clock
        self.requests: list[SampleRequest] = []
        self.prompts: list[bytes] = []
        self.sampled = np.zeros(slots, np.int64)
        self.drawn = np.zeros(slots, np.int64)
        self.cached = np.zeros(slots, np.bool_)
        self.held = np.zeros(slots, np.int64)
        self.interrupted = np.zeros(slots, np.int64)
        self.age = np.zeros(slots, np.int64)
        self.tokens = np.zeros((slots, max_new_tokens), np.int32)
        self.logprobs = np.zeros((slots, max_new_tokens), np.float32)
        self.versions = np.zeros((slots, max_new_tokens), np.int32)
        self.ends_at = np.zeros(slots, np.float64)
        self.left = np.zeros(slots, np.float64)
        self._experts = None if record is None else SampleExperts(slots, max_new_tokens, record)
        self._started = 0

    @property
    def decoding(self) -> Ints:
        """Returns the cached rows."""
        return np.flatnonzero(self.cached[: len(self.requests)])

    @property
    def prefilling(self) -> Ints:
        """Returns the other rows, the one that started first at the front."""
        rows = np.flatnonzero(~self.cached[: len(self.requests)])
        return rows[np.argsort(self.age[rows])]

    def add(self, request: SampleRequest) -> None:
        """Gives a request a row, from which on its deadline runs."""
        row = len(self.requests)
        self.ends_at[row] = self.clock() + request.deadline
        self.left[row] = np.inf
        self.sampled[row] = 0
        self.drawn[row] = request.drawn
        self.cached[row] = False
        self.held[row] = 0
        self.interrupted[row] = 0
        self.age[row] = self._started
        self._started += 1
        self.requests.append(request)
        self.prompts.append(request.prompt_key)

    def remove(self, row: int) -> None:
        """Removes a row; the last row takes its place."""
        last = len(self.requests) - 1
        columns: list[list[Any] | NDArray[Any]] = [self.requests, self.prompts, self.sampled, self.drawn, self.cached]
        columns += [self.held, self.interrupted, self.age, self.ends_at, self.left]
        for column in (*columns, self.tokens, self.logprobs, self.versions):
            column[row] = column[last]
        if self._experts is not None:
            self._experts.move(last, row)
        self.requests.pop()
        self.prompts.pop()

    def stop_deadline(self, row: int) -> None:
        """Stops the deadline of a row that lost its blocks."""
        if self.ends_at[row] < np.inf:
            self.left[row] = self.ends_at[row] - self.clock()
            self.ends_at[row] = np.inf

    def resume_deadline(self, row: int) -> None:
        """Lets a stopped deadline run again, with the seconds that were left."""
        if self.ends_at[row] == np.inf and self.left[row] < np.inf:
            self.ends_at[row] = self.clock() + self.left[row]

    def overdue(self, rows: Ints) -> NDArray[np.bool_]:
        """Returns of each of these rows whether its deadline is over."""
        return self.ends_at[rows] <= self.clock()

    def lengths(self, rows: Ints) -> Ints:
        """Returns the prompt and sampled tokens of each of these rows."""
        return np.array([len(self.requests[row].prompt) for row in rows], np.int64) + self.sampled[rows]

    def sequence(self, row: int) -> Ints:
        """Returns all tokens of a row, prompt first."""
        parts = [self.requests[row].prompt, self.tokens[row, : self.sampled[row]]]
        return np.concatenate(parts).astype(np.int64)

    def newest(self, rows: Ints) -> Ints:
        """Returns the newest token of each of these rows; of a row without sampled tokens, the last of its prompt."""
        found = self.tokens[rows, self.sampled[rows] - 1].astype(np.int64)
        for index in np.flatnonzero(self.sampled[rows] == 0):
            found[index] = self.requests[rows[index]].prompt[-1]
        return found

    def uniforms(self, rows: Ints) -> NDArray[np.float64]:
        """Returns the uniform numbers that draw the next token of each row."""
        seeds = np.array([self.requests[row].seed for row in rows], np.uint64)
        return draws(seeds, (self.drawn[rows] + self.sampled[rows]).astype(np.uint64))

    def note_experts(self, rows: Ints, recall: Recall) -> None:
        """Notes the experts of the newest computed token of each row, before the next one is recorded; of a row that
        begins, those of its prompt too."""
        if self._experts is not None:
            self._experts.note(rows, self.lengths(rows) - self.sampled[rows], self.sampled[rows], recall)

    def record(self, rows: Ints, tokens: Ints, logprobs: NDArray[np.float32], version: int) -> None:
        """Appends one sampled token to each of the rows."""
        at = (rows, self.sampled[rows])
        self.tokens[at] = tokens
        self.logprobs[at] = logprobs
        self.versions[at] = version
        self.sampled[rows] += 1
        self.cached[rows] = True
        self.interrupted[rows] = 0

    def completion(self, row: int, finish: Finish, text: str) -> Completion:
        """Returns a copy of what was recorded of a row."""
        span = np.s_[row, : self.sampled[row]]
        recorded = (self.tokens[span].copy(), self.logprobs[span].copy(), self.versions[span].copy())
        experts = None
        if self._experts is not None:
            experts = self._experts.of(row, len(self.requests[row].prompt), int(self.sampled[row]))
        return Completion(self.requests[row], *recorded, finish, text, experts)


# Who gets the blocks of the KV cache: running rows, prompts that several rows share, and parked sequences.
#
#     decoding row needs a block ── free? ── else evict parked sequences, then shared prompts
#                                         ── else preempt the youngest row: it prefills again later
#
# The row that started first never loses its blocks, and the cache holds at least one row of the longest length, so it
# always ends: nothing waits forever.


PromptKey = bytes  # the tokens themselves and pictures: equal prompts of different groups are shared too
Sample = tuple[int, int]  # group, member: another attempt may go on where the last one was


class BlockCache(Protocol):
    """Holds the contents of blocks."""

    @property
    def tables(self) -> BlockTables: ...

    def copy_block(self, source: int, slots: list[int], index: int) -> None:
        """Copies a block to the block `index` of these slots."""


class BlockMemory:
    """Gives blocks to the rows of the batch. parked: sequences that wait for their next turn. prompts: those that rows
    share. preemptions: rows so far that lost their blocks to others. scarce: whether a row lacked blocks in the last
    step. The row that started first never loses its blocks, and row i of the batch is slot i of the tables. TorchEngine
    calls it, in each step in the order of the sections below."""

    def __init__(self, cache: BlockCache, batch: RunningBatch) -> None:
        self._cache = cache
        self._tables = cache.tables
        self._batch = batch
        self.parked = ParkedSequences(cache.tables)
        self.prompts = SharedPrompts(cache.tables)
        self.preemptions = 0
        self.scarce = False

    # ---- a row starts and ends -------------------------------------------------------------------------------

    def take_back(self, row: int) -> None:
        """Gives a row that goes on the blocks that were parked for it."""
        request = self._batch.requests[row]
        self._batch.held[row] = self.parked.take(request.key[:2], request.prompt, row)

    def leave(self, row: int, *, park: bool) -> None:
        """Removes a row. park: keep its blocks, which hold all of its tokens but the newest, for the next turn."""
        if not self._batch.cached[row]:
            self.prompts.had(self._batch.prompts[row])
        elif park:
            tokens = self._batch.sequence(row)[:-1]
            group, member, attempt = self._batch.requests[row].key
            kept = self._tables.keep(row, int(self._tables.counts[row]))
            self.parked.park((group, member), ParkedSequence(tokens, kept, attempt))
        self._tables.free(row)
        self._tables.swap(row, len(self._batch.requests) - 1)
        self._batch.remove(row)

    def weights_changed(self, *, recompute: bool) -> None:
        """Drops what new samples must not begin with: shared prompts, and prompts that are computed in part. recompute:
        all running rows and parked sequences lose their keys and values too."""
        self.prompts.clear()
        if recompute:
            self.parked.clear()
        for row in range(len(self._batch.requests)):
            if recompute or not ((self._batch.cached[row] and self._batch.sampled[row]) or self._batch.drawn[row]):
                self._batch.interrupted[row] += bool(self._batch.held[row]) and not self._batch.cached[row]
                self._give_up(row)

    # ---- before a forward ------------------------------------------------------------------------------------

    def share_prompts(self) -> None:
        """Gives rows without blocks those of their prompt, where another row has computed it."""
        for row in self._batch.prefilling.tolist():
            if not self._tables.counts[row] and self.prompts.find(self._batch.prompts[row]) is not None:
                self._share(row)

    def secure_next(self) -> None:
        """Gives each decoding row a block for its newest token, or preempts it."""
        rows = self._batch.decoding
        lacking = rows[self._tables.counts[rows] * KV_BLOCK < self._batch.lengths(rows)]
        for row in lacking[np.argsort(self._batch.age[lacking])].tolist():
            if self._batch.cached[row]:
                self._secure(row)

    def secure_prefills(self, tokens: float) -> list[int]:
        """Gives rows in prefill blocks for their whole sequence, the first first, until they have so many tokens to
        compute; returns those that have blocks. Younger rows that decode may be preempted. Of rows with one prompt that
        all share, one computes it. Others leave parked sequences their blocks for one more step."""
        ready: list[int] = []
        computing = set[bytes]()
        self.scarce = False
        for row in self._batch.prefilling.tolist():
            prompt = self._batch.prompts[row]
            if not self._tables.counts[row] and prompt in computing and self._would_share(row):
                continue
            computing.add(prompt)
            if not self._secure(row):
                self.scarce = True
                break
            ready.append(row)
            tokens -= int(self._batch.lengths(np.array([row]))[0] - self._batch.held[row])
            if tokens <= 0:
                break
        return [row for row in ready if self._tables.counts[row]]

    # ---- after a forward -------------------------------------------------------------------------------------

    def computed(self, row: int, end: int) -> list[int]:
        """Notes that the cache holds the first `end` tokens of a row. Returns rows that now have all of the prompt,
        which is also all of their sequence."""
        self._batch.held[row] = end
        request = self._batch.requests[row]
        prompt = self._batch.prompts[row]
        if end < len(request.prompt) or request.drawn:
            return []
        self.prompts.offer(prompt, row, len(request.prompt))
        if self._batch.sampled[row] or self.prompts.find(prompt) is None:
            return []
        alike = [other for other in self._batch.prefilling.tolist() if self._batch.prompts[other] == prompt]
        fresh = [other for other in alike if not self._batch.sampled[other] and not self._tables.counts[other]]
        return [other for other in fresh if self._share(other)]

    def cached(self, rows: Ints) -> None:
        """Notes that the cache holds these rows up to a token that is sampled now."""
        for row in rows[~self._batch.cached[rows]].tolist():
            self.prompts.had(self._batch.prompts[row])
        self._batch.cached[rows] = True

    # ---- blocks ----------------------------------------------------------------------------------------------

    def _would_share(self, row: int) -> bool:
        return not self._batch.sampled[row] or whole_blocks(len(self._batch.requests[row].prompt)) > 0

    def _share(self, row: int) -> bool:
        """Gives a row without blocks those of its prompt. A row that has sampled nothing gets a copy of the last one,
        and has all of the prompt but its newest token; returns whether it has."""
        length = len(self._batch.requests[row].prompt)
        whole = whole_blocks(length)
        sampled = int(self._batch.sampled[row])
        if not sampled and self._tables.pool.room == 0:
            return False
        kept = self.prompts.find(self._batch.prompts[row])
        assert kept is not None, "the prompt was found"
        self._tables.share(row, kept, whole)
        self._batch.resume_deadline(row)
        if sampled:
            self._batch.held[row] = whole * KV_BLOCK
            return False
        self._tables.allocate(row, length)
        self._cache.copy_block(int(kept.blocks[whole]), [row], whole)
        self.cached(np.array([row]))
        return True

    def _secure(self, row: int) -> bool:
        """Gives a row blocks for all of its tokens; returns whether it has them. A row that nobody else can give any,
        gives up its own."""
        length = int(self._batch.lengths(np.array([row]))[0])
        while (lacking := self._tables.lacking(row, length)) > self._tables.pool.room:
            if self.parked.evict_one() or self.prompts.evict_one():
                continue
            owners = np.flatnonzero(self._tables.counts[: len(self._batch.requests)])
            younger = owners[self._batch.age[owners] > self._batch.age[row]]
            if not len(younger):
                if self._tables.counts[row]:
                    self._preempt(row)
                return False
            self._preempt(int(younger[self._batch.age[younger].argmax()]))
        if lacking:
            self._tables.allocate(row, length)
        self._batch.resume_deadline(row)
        return True

    def _preempt(self, row: int) -> None:
        self.preemptions += 1
        self._give_up(row)

    def _give_up(self, row: int) -> None:
        """Frees the blocks of a row, whose sequence is prefilled again later; its deadline stops until then."""
        if self._batch.cached[row]:
            self.prompts.want(self._batch.prompts[row])
        self._batch.cached[row] = False
        self._batch.held[row] = 0
        owned = self._tables.counts[row]
        self._tables.free(row)
        if self._tables.counts[row] < owned:
            self._batch.stop_deadline(row)


class SharedPrompts:
    """Keeps the blocks of prompts by their tokens. Prompts that end within a block share the blocks before it; the one
    that has their newest token is copied for each sample. A prompt is kept only while a sample still wants it, which
    `want` and `had` count. TorchEngine wants, BlockMemory does the rest."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._kept: dict[PromptKey, KeptBlocks] = {}
        self._wanted: Counter[PromptKey] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def want(self, prompt: PromptKey) -> None:
        """Notes that one more sample has to have this prompt in the cache."""
        self._wanted[prompt] += 1

    def had(self, prompt: PromptKey) -> None:
        """Notes that one sample less wants the prompt: it has it, or has ended."""
        self._wanted[prompt] -= 1
        if self._wanted[prompt] <= 0:
            del self._wanted[prompt]
            self._drop(prompt)

    def find(self, prompt: PromptKey) -> KeptBlocks | None:
        return self._kept.get(prompt)

    def offer(self, prompt: PromptKey, slot: int, length: int) -> None:
        """Keeps the blocks of a prompt of `length` tokens that a slot has, if others want it."""
        if prompt not in self._kept and self._wanted[prompt] > 1:
            self._kept[prompt] = self._tables.keep(slot, blocks_for(length))

    def evict_one(self) -> bool:
        """Drops the prompt that was kept first; returns whether there was one."""
        if self._kept:
            self._drop(next(iter(self._kept)))
            return True
        return False

    def clear(self) -> None:
        """Drops all prompts: the weights are new."""
        for prompt in list(self._kept):
            self._drop(prompt)

    def _drop(self, prompt: PromptKey) -> None:
        if (kept := self._kept.pop(prompt, None)) is not None:
            self._tables.drop(kept)


def whole_blocks(length: int) -> int:
    """Returns how many blocks of a prompt of `length` tokens hold none of its newest token, which samples share."""
    return (length - 1) // KV_BLOCK


@dataclass(frozen=True, slots=True, eq=False)
class ParkedSequence:
    """tokens: those whose keys and values the blocks hold. attempt: at its group, that sampled it."""

    tokens: Ints
    kept: KeptBlocks
    attempt: int = 0

    @property
    def blocks(self) -> int:
        return len(self.kept.blocks)


class ParkedSequences:
    """Keeps parked sequences until they are taken, evicted or forgotten. They are bounded by the KV blocks of the
    cache: a running sequence that needs blocks evicts them, those first that are needed last. blocks: of all. hits,
    misses: sequences that went on with their keys and values, and those whose were gone. A sample has at most one,
    parked or queued. TorchEngine queues and forgets, BlockMemory does the rest."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._parked: dict[Sample, ParkedSequence] = {}  # in the order in which they were parked
        self._queued: dict[Sample, ParkedSequence] = {}  # those whose next turn waits for a slot, in this order
        self.blocks = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._parked) + len(self._queued)

    def park(self, sample: Sample, sequence: ParkedSequence) -> None:
        self._remove(sample)
        self._parked[sample] = sequence
        self.blocks += sequence.blocks

    def queue(self, sample: Sample) -> None:
        """Notes that the next turn of a sample waits for a slot, behind those of others."""
        if (found := self._parked.pop(sample, None)) is not None:
            self._queued[sample] = found

    def take(self, sample: Sample, tokens: NDArray[np.int32], slot: int) -> int:
        """Gives a slot without blocks those of a sample, if there is one with which these tokens begin. Returns how
        many tokens they hold, 0 without any; the newest token is never one of them, because it has to be computed: a
        conversation that begins again may be no longer than what was parked. The sample is parked no longer."""
        found = self._find(sample)
        held = 0
        if found is not None and np.array_equal(found.tokens, tokens[: len(found.tokens)]):
            held = min(len(found.tokens), len(tokens) - 1)
        if found is not None and held:
            self._tables.share(slot, found.kept, found.blocks)
        self._remove(sample)
        self.hits += held > 0
        self.misses += held == 0
        return held

    def evict_one(self) -> bool:
        """Gives up a sequence whose environment is still asked, the one that was parked first, or else the last one in
        the queue for slots; returns whether there was one."""
        if not len(self):
            return False
        self._remove(next(iter(self._parked)) if self._parked else next(reversed(self._queued)))
        return True

    def forget(self, samples: Iterable[Key], oldest: int = 0) -> None:
        """Gives up the sequences of these samples, in these attempts and earlier ones, and of groups from 0 up to,
        without, `oldest`."""
        for group, member, attempt in samples:
            found = self._find((group, member))
            if found is not None and found.attempt <= attempt:
                self._remove((group, member))
        if len(self) and oldest:
            for sample in [sample for sample in (*self._parked, *self._queued) if 0 <= sample[0] < oldest]:
                self._remove(sample)

    def clear(self) -> None:
        while self.evict_one():
            pass

    def _find(self, sample: Sample) -> ParkedSequence | None:
        return self._parked.get(sample) or self._queued.get(sample)

    def _remove(self, sample: Sample) -> None:
        found = self._parked.pop(sample, None) or self._queued.pop(sample, None)
        if found is not None:
            self.blocks -= found.blocks
            self._tables.drop(found.kept)
