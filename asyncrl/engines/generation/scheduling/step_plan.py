"""Plans what a step computes of sequences in prefill: chunks within a budget, so that no step is long.

A token attends to all tokens before it, so a late token of a long prompt costs more than an early one. The budget is
counted in first tokens of a prompt.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

FEWEST_TOKENS = 8  # of a chunk that does not end its sequence; smaller ones cost as much
IDLE_BUDGETS = 16  # budgets of a step without decoding sequences, in which nothing waits


@dataclass(frozen=True, slots=True)
class Prefill:
    """A sequence in prefill. held: first tokens whose keys and values the cache has. length: tokens of the sequence."""

    row: int
    held: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `first` up to, without, `end` of the sequence of a row. last: whether the sequence ends with them."""

    row: int
    first: int
    end: int
    last: bool


def step_budget(tokens: int, decoding: int, waiting: int) -> float:
    """Returns the budget of a step in which so many rows decode, and so many wait in prefill.

    It is `tokens` beside a full batch, and rises with the share of rows that wait: one long prompt does
    not slow down the others, and turns that begin together do not queue behind a few that decode.
    """
    share = waiting / max(1, decoding + waiting)
    return tokens * (1 + (IDLE_BUDGETS - 1) * share)


def plan_chunks(prefills: Iterable[Prefill], budget: float, position_cost: float) -> list[Chunk]:
    """Returns the chunks of one step, in the order of `prefills`; the first is never empty.

    budget: cost of all chunks together, where a token at position p costs 1 + p * position_cost.
    """
    chunks: list[Chunk] = []
    for each in prefills:
        left = each.length - each.held
        fitting = _tokens_within(budget, each.held, position_cost)
        if not chunks:
            fitting = max(fitting, FEWEST_TOKENS)
        count = min(left, fitting)
        if count < min(left, FEWEST_TOKENS):
            break
        chunks.append(Chunk(each.row, each.held, each.held + count, last=count == left))
        budget -= count * (1 + position_cost * (each.held + count / 2))
    return chunks


def _tokens_within(budget: float, held: int, position_cost: float) -> int:
    """Returns the largest n with n (1 + held c) + n^2 c / 2 <= budget, where c is the cost of a position."""
    if budget <= 0:
        return 0
    linear = 1 + held * position_cost
    return int(2 * budget / (linear + math.sqrt(linear**2 + 2 * position_cost * budget)))
