"""Prompts whose keys and values are computed once for all samples that begin with them.

The first sample computes the prompt. Its blocks are kept while other samples want them: samples that wait for a slot,
and samples whose own keys and values were given up. New weights drop them all, because a prompt is shared only while
its tokens and the version of the weights are the same.
"""

from collections import Counter

from asyncrl.engines.generation.scheduling.block_tables import KV_BLOCK, BlockTables, KeptBlocks, blocks_for

PromptKey = bytes  # the tokens themselves and pictures: equal prompts of different groups are shared too


class SharedPrompts:
    """Keeps the blocks of prompts by their tokens. Prompts that end within a block share the blocks before it; the one
    that has their newest token is copied for each sample."""

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
