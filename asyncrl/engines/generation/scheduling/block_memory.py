"""Who gets the blocks of the KV cache: running rows, prompts that several rows share, and parked sequences.

    decoding row needs a block ── free? ── else evict parked sequences, then shared prompts ── else preempt the youngest
                                                                                            row: it prefills again later

The row that started first never loses its blocks, and the cache holds at least one row of the longest length, so it
always ends: nothing waits for ever.
"""

from typing import Protocol

import numpy as np

from asyncrl.engines.generation.scheduling.block_pool import Ints
from asyncrl.engines.generation.scheduling.block_tables import KV_BLOCK, BlockTables
from asyncrl.engines.generation.scheduling.parked_sequences import ParkedSequence, ParkedSequences
from asyncrl.engines.generation.scheduling.prompt_reuse import SharedPrompts, whole_blocks
from asyncrl.engines.generation.scheduling.running_batch import RunningBatch


class BlockCache(Protocol):
    """Holds the contents of blocks."""

    @property
    def tables(self) -> BlockTables: ...

    def copy_block(self, source: int, slots: list[int], index: int) -> None:
        """Copies a block to the block `index` of these slots."""


class BlockMemory:
    """Gives blocks to the rows of the batch. parked: sequences that wait for their next turn. prompts: those that rows
    share. preemptions: rows so far that lost their blocks to others. scarce: whether a row lacked blocks in the last
    step."""

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
        request, prompt = self._batch.requests[row], self._batch.prompts[row]
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
        whole, sampled = whole_blocks(length), int(self._batch.sampled[row])
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
        self._batch.uncache(row)
        owned = self._tables.counts[row]
        self._tables.free(row)
        if self._tables.counts[row] < owned:
            self._batch.stop_deadline(row)
