"""Declares the workloads of the end-to-end measurement: prompts, completion lengths, and how fast a reward is."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

GROUPS = 64
MEMBERS = 8
SAMPLES = GROUPS * MEMBERS
PROMPT_TOKENS = 8
PROMPTS = 1024
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Workload:
    """Describes what all sides train on. lengths: tokens of each sample of a batch. parallel_scores: samples that the
    slow reward scores at a time; 0: all; None: the reward takes no time. over_trl, over_synchronous: goals for the
    ratio of trained tokens per second."""

    name: str
    lengths: tuple[int, ...]
    parallel_scores: int | None
    over_trl: float
    over_synchronous: float


def workloads(parallel_scores: int) -> dict[str, Workload]:
    order = list(range(SAMPLES))
    random.Random(0).shuffle(order)
    same = (32,) * SAMPLES
    tailed = tuple(lognormal(SAMPLES, 32, 1.0, 256, order))
    slow_reward = f"a reward that takes 200 ms, {parallel_scores or 'all'} samples at a time"
    return {
        "equal": Workload("all completions 32 tokens", same, None, 1.4, 1.3),
        "lognormal": Workload("lognormal lengths (sigma 1, mean 32, cap 256)", tailed, None, 2.0, 1.7),
        "judge": Workload(slow_reward, same, parallel_scores, 2.0, 1.7),
    }


def lognormal(samples: int, mean: float, sigma: float, cap: int, order: Sequence[int]) -> list[int]:
    """Returns the quantiles of the distribution in this order, one per sample: a batch always has the same lengths.
    mean: before the cap; mean = exp(mu + sigma^2 / 2)."""
    normal = NormalDist()
    mu = math.log(mean) - sigma**2 / 2
    quantiles = [math.exp(mu + sigma * normal.inv_cdf((rank + 0.5) / samples)) for rank in range(samples)]
    return [min(cap, max(1, round(quantiles[place]))) for place in order]


def write_prompts(file: Path) -> None:
    source = random.Random(0)
    words = [" ".join(f"w{source.randrange(2000)}" for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))
