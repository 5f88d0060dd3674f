"""The most bytes of tensors at one moment, from what the profiler saw of them."""

from types import SimpleNamespace
from typing import Any

from torch._C._profiler import _EventType

from asyncrl.bench.end_to_end.torch_memory import most_at_once


def event(at: int, size: int, address: int, *children: Any) -> Any:
    made = SimpleNamespace(alloc_size=size, ptr=address)
    return SimpleNamespace(start_time_ns=at, tag=_EventType.Allocation, extra_fields=made, children=children)


def test_tensors_that_a_thread_of_gloo_freed_do_not_count() -> None:
    seen = [
        event(5, -30, 1),
        event(1, 30, 1, event(2, 100, 2)),  # The profiler did not see the second tensor freed,
        event(3, 8, 2),  # and this one lies where it was.
        event(4, -8, 2),
        event(6, -500, 9),  # This one was there before.
        SimpleNamespace(start_time_ns=0, tag=_EventType.TorchOp, children=[event(7, 20, 3), event(8, -20, 3)]),
    ]
    assert most_at_once(SimpleNamespace(experimental_event_tree=lambda: seen)) == 38
