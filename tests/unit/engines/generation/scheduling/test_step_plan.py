"""Chunks of prompts fill the budget of a step and no more, and each step makes progress."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.generation.torch_engine import (
    FEWEST_TOKENS,
    IDLE_BUDGETS,
    Prefill,
    plan_chunks,
    step_budget,
)

LENGTHS = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 5000)), min_size=1, max_size=8)


@given(LENGTHS, st.floats(1, 3000), st.floats(1e-6, 0.01))
def test_chunks_stay_within_the_budget_and_the_first_sequence_goes_on(
    lengths: list[tuple[int, int]], budget: float, position_cost: float
) -> None:
    prefills = [Prefill(row, held, held + left) for row, (held, left) in enumerate(lengths)]
    chunks = plan_chunks(prefills, budget, position_cost)
    assert chunks[0].row == 0
    assert chunks[0].end > chunks[0].first
    cost = sum(1 + position_cost * at for chunk in chunks for at in range(chunk.first, chunk.end))
    least = sum(1 + position_cost * (prefills[0].held + at) for at in range(FEWEST_TOKENS))
    assert cost <= max(budget, least) + FEWEST_TOKENS * position_cost
    for chunk, each in zip(chunks, prefills, strict=False):
        assert (chunk.row, chunk.first) == (each.row, each.held)
        assert chunk.last == (chunk.end == each.length)


def test_late_tokens_of_a_long_prompt_come_in_smaller_chunks() -> None:
    early, late = (plan_chunks([Prefill(0, held, 9000)], 100, 1e-3)[0] for held in (0, 4000))
    assert early.end - early.first > 4 * (late.end - late.first)


def test_a_short_prompt_shares_the_step_with_the_end_of_a_long_one() -> None:
    first, second = plan_chunks([Prefill(3, 990, 1000), Prefill(5, 0, 30)], 64, 0.0)
    assert (first.last, second.last) == (True, True)
    assert second.end == 30


def test_the_budget_rises_with_the_share_of_rows_that_wait() -> None:
    assert step_budget(100, 0, 5) == 100 * IDLE_BUDGETS
    assert 100 < step_budget(100, 31, 1) < 150
    assert step_budget(100, 16, 16) > 400
