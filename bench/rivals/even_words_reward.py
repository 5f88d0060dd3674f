"""Defines the reward of the end-to-end measurement for all sides: the share of words with an even number.

Reward children and interpreters of other systems import this file: it uses the standard library only.
"""

import asyncio
from typing import Any

SCORE_SECONDS = 0.2
"""Seconds that the slow reward takes for a sample."""

_semaphores: dict[int, asyncio.Semaphore] = {}


def share_of_even(text: str) -> float:
    words = text.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))


def at_once(sample: Any) -> float:
    return share_of_even(sample.text)


async def slowly(sample: Any, parallel_scores: int = 32) -> float:
    return await share_of_even_slowly(sample.text, parallel_scores)


async def share_of_even_slowly(text: str, parallel_scores: int) -> float:
    """Takes as long as a scorer over the network: `parallel_scores` samples at a time; 0: all at once."""
    if not parallel_scores:
        await asyncio.sleep(SCORE_SECONDS)
        return share_of_even(text)
    async with _semaphores.setdefault(parallel_scores, asyncio.Semaphore(parallel_scores)):
        await asyncio.sleep(SCORE_SECONDS)
    return share_of_even(text)
