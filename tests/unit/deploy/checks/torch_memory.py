"""Counts the bytes of tensors that a process has, and the most that it has at one moment while something runs."""

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from asyncrl.engines.ranks.shards import own_part

NOT_OF_TORCH = ("process", "pixels", "kept by malloc")
"""Parts of a prediction that torch does not allocate."""
T = TypeVar("T")


def most_beside(work: Callable[[], T]) -> tuple[int, T]:
    """Runs `work`. Returns the most bytes that torch had at one moment beside those of before, and what `work` did.
    What is not seen to be freed is left out: threads of gloo, which the profiler does not follow, free what an exchange
    has just used."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        done = work()
    assert profiled.profiler is not None, "the profile is over"
    events = list[Any]()
    left = [*profiled.profiler.kineto_results.experimental_event_tree()]
    while left:
        event = left.pop()
        left += event.children
        if event.tag == _EventType.Allocation:
            events.append(event)
    events.sort(key=lambda each: each.start_time_ns)
    changes = np.zeros(len(events), np.int64)
    living = dict[int, int]()
    for number, each in enumerate(events):
        made = each.extra_fields
        if made.alloc_size > 0:
            living[made.ptr] = number
        elif made.ptr in living:
            changes[living.pop(made.ptr)] = -made.alloc_size
            changes[number] = made.alloc_size
    return int(changes.cumsum().max(initial=0)), done


def held_bytes() -> int:
    """Returns the bytes of all tensors of this process, each block of memory once."""
    gc.collect()
    found: dict[int, int] = {}
    for each in gc.get_objects():
        # Objects that say of which class they are may import what that is.
        if issubclass(type(each), torch.Tensor) and not each.is_meta:
            for tensor in (each, each.grad if each.is_leaf else None):
                if tensor is not None:
                    storage = own_part(tensor.detach()).untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
