"""What torchless.toml trains on: prompts that nobody reads, and a reward that depends on every token."""

import os
import random
import time
from typing import Any


def prompts(size: int, seed: int) -> list[dict[str, str]]:
    chance = random.Random(seed)
    return [{"prompt": f"count from {chance.randrange(1000)}:"} for _ in range(size)]


def even(sample: Any) -> float:
    """The share of even tokens."""
    tokens = [int(word) for word in sample.text.split()]
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def forks_and_hangs(sample: Any) -> float:
    """The same, but one sample in twelve leaves a process behind that sleeps, as the function itself then does."""
    if (sample.group + sample.member) % 12 == 0:
        os.fork()
        time.sleep(1000)
    return even(sample)
