"""Rows are kept until their sample is released, at a cost of what is released."""

import random

from asyncrl.lanes.data.row_store import RowRetention
from asyncrl.protocols.batch import Place
from tests.instruction_count import counting


def place(slot: int) -> Place:
    return Place("owner", slot, 1, ())


Kept = dict[tuple[int, int], tuple[int, Place]]


def kept_by_scan(
    kept: dict[tuple[int, int], tuple[int, Place]], samples: list[tuple[int, int, int]], oldest: int
) -> set[Place]:
    """Releases as the rule says it: every kept row is looked at."""
    last = {(group, member): attempt for group, member, attempt in sorted(samples)}
    released = [
        key for key, (attempt, _) in kept.items() if attempt <= last.get(key, attempt - 1) or 0 <= key[0] < oldest
    ]
    return {kept.pop(key)[1] for key in released}


def test_what_is_released_is_what_a_look_at_every_row_would_release() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        retention = RowRetention()
        kept = Kept()
        oldest = 0
        for slot in range(200):
            group = chance.randint(-2, 12)
            member = chance.randint(-1, 2)
            attempt = chance.randint(0, 2)
            freed = retention.add((group, member, attempt), place(slot))
            before = kept.get((group, member))
            if before is not None and before[0] > attempt:
                assert freed == [place(slot)]
            else:
                assert freed == ([] if before is None else [before[1]])
                kept[group, member] = attempt, place(slot)
            if chance.random() < 0.2:
                oldest += chance.randint(0, 2)
                samples = [(chance.randint(-2, 12), chance.randint(-1, 2), chance.randint(0, 2)) for _ in range(4)]
                assert set(retention.release(samples, oldest)) == kept_by_scan(kept, samples, oldest)
                assert retention.attempts() == {key: each for key, (each, _) in kept.items()}


def test_a_row_that_is_stored_after_its_group_has_finished_goes_with_the_next_release() -> None:
    retention = RowRetention()
    assert retention.release([], 5) == []
    retention.add((3, 0, 0), place(1))
    assert retention.release([], 5) == [place(1)]


def test_a_release_costs_no_more_where_more_rows_are_kept() -> None:
    few = _instructions(100)
    many = _instructions(10_000)
    assert many <= 1.1 * few


def _instructions(groups: int) -> int:
    retention = RowRetention()
    for group in range(groups):
        retention.add((group, 0, 0), place(group))
    retention.release([], 1)
    with counting() as count:
        for group in range(1, 50):
            retention.release([(group, 0, 0)], group)
    return count.instructions
