"""Measures steps of samples that decode while a long prompt is computed beside them, and the memory of the cache."""

import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from time import thread_time

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.bench.end_to_end.benchmark_model import SPECIAL, VOCABULARY, EndlessEngine
from asyncrl.bench.measurements import MachineLoad, goal_line
from asyncrl.config.schema import Config
from asyncrl.engines.generation.engine_interface import SampleRequest

LONG_PROMPT = 4096
PROMPT = 32
SAMPLED = 640
WARM_STEPS = 20
SLOWEST = 99  # percentile of the steps
LONGEST_STEP_GOAL = 2.0
MEMORY_GOAL = 1.1
PAGE = os.sysconf("SC_PAGE_SIZE")


def measure_long_prompt(model: Path, slots: int, rounds: int) -> list[str]:
    """Prints the CPU time of the steps, the least of all rounds for each step; returns the lines of the goals."""
    load = MachineLoad()
    task = {"prompts": "none", "max_prompt_tokens": LONG_PROMPT}
    generation = {"slots": slots, "max_new_tokens": SAMPLED}
    config = Config.model_validate({"model": {"name": "tiny"}, "task": task, "generation": generation})
    engine = EndlessEngine(model, config, version=0)
    steps = 1000 * np.min([seconds_of_steps(engine, slots) for _ in range(rounds)], axis=0)
    middle, slow = np.percentile(steps, [50, SLOWEST])
    print(f"a prompt of {LONG_PROMPT:,} tokens beside {slots - 1} samples: {len(steps)} steps until its first token")
    print(f"  CPU time of a step: median {middle:.3g} ms, p{SLOWEST} {slow:.3g}, longest {steps.max():.3g}")
    cache = engine._flat.cache
    resident = resident_bytes(chain.from_iterable(cache._layers))
    computed = cache.bytes
    print(f"  keys and values: {resident / 1e6:.1f} MB of memory, {computed / 1e6:.1f} MB computed\n  {load}\n")
    label = f"a step's p{SLOWEST} over its median beside a long prompt"
    return [
        goal_line(label, slow / middle, LONGEST_STEP_GOAL, at_most=True),
        goal_line("memory of the cache over what is computed", resident / computed, MEMORY_GOAL, at_most=True),
    ]


def seconds_of_steps(engine: EndlessEngine, slots: int) -> NDArray[np.float64]:
    """Returns the CPU seconds of each step from the arrival of the long prompt to its first token."""
    source = np.random.default_rng(0)
    prompts = source.integers(len(SPECIAL), VOCABULARY, (slots - 1, PROMPT)).astype(np.int32)
    beside = [SampleRequest((number, 0, 0), prompt, number, 1.0, SAMPLED) for number, prompt in enumerate(prompts)]
    engine.submit(*beside)
    for _ in range(WARM_STEPS):
        engine.step()
    long = source.integers(len(SPECIAL), VOCABULARY, LONG_PROMPT).astype(np.int32)
    engine.submit(SampleRequest((slots, 0, 0), long, slots, 1.0, 1))
    seconds = list[float]()
    while engine.running in (slots - 1, slots) and (engine.waiting or engine.running == slots):
        began = thread_time()
        engine.step()
        seconds.append(thread_time() - began)
    engine.end([request.key for request in beside], "abort")
    return np.array(seconds)


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the pages of these tensors, on the CPU, that the system has provided."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        found = 0
        for tensor in tensors:
            first = tensor.data_ptr() // PAGE
            pages = -(-(tensor.data_ptr() + tensor.nbytes) // PAGE) - first
            entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * pages, 8 * first), np.uint64)
            found += PAGE * int(np.count_nonzero(entries >> np.uint64(63)))
    return found
