import gc
import weakref

import pytest

from asyncrl.fleet.worker.process_memory import YOUNG_OF_CALLER, gc_frozen


class Node:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_survives_a_step_is_collected_no_more() -> None:
    with gc_frozen() as frozen:
        in_flight = [[0]]
        assert any(each is in_flight for each in gc.get_objects())
        frozen.add_survivors()
        assert not any(each is in_flight for each in gc.get_objects())


def test_young_garbage_is_freed_before_the_rest_is_frozen() -> None:
    with gc_frozen() as frozen:
        gone = weakref.ref(Node())
        frozen.add_survivors()
        assert gone() is None


def test_a_cycle_of_frozen_objects_is_freed_when_the_process_holds_twice_as_much() -> None:
    with gc_frozen() as frozen:
        node = Node()
        frozen.add_survivors()
        gone = weakref.ref(node)
        del node
        frozen.add_survivors()
        assert gone() is not None, "frozen"
        more = [float(number) for number in range(frozen.most_blocks)]
        frozen.add_survivors()
        assert gone() is None
        assert len(more) * 2 <= frozen.most_blocks


@pytest.mark.parametrize(("before", "inside"), [(700, YOUNG_OF_CALLER), (10**6, 10**6)])
def test_many_waiting_calls_are_not_looked_at_again_and_again(before: int, inside: int) -> None:
    own = gc.get_threshold()
    gc.set_threshold(before, 10, 10)
    try:
        with gc_frozen(YOUNG_OF_CALLER):
            began = gc.get_stats()[0]["collections"]
            waiting = [[number] for number in range(YOUNG_OF_CALLER // 2)]
            assert gc.get_stats()[0]["collections"] == began
            assert gc.get_threshold() == (inside, 10, 10)
        assert len(waiting) == YOUNG_OF_CALLER // 2
        assert gc.get_threshold() == (before, 10, 10)
    finally:
        gc.set_threshold(*own)
