import gc
import weakref

from asyncrl.fleet.worker.gc_freeze import gc_frozen


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
