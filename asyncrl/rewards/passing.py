"""Says which answers pass: a threshold with room for the rounding of sums, and whether any answer can reach it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config.problems import Problem
from asyncrl.rewards.code_templates import passes_tests
from asyncrl.rewards.templates import ENVIRONMENT, PENALTIES

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

TESTS = passes_tests.__name__
"""Term by which programs pass, if no other one is named."""
ROUNDING = 5e-7
"""Share of what was added up by which a sum may miss a threshold that it reaches on paper: weights of 0.7, 0.2 and 0.1
make 0.9999999999999999, and functions that compute in float32 lose 1e-7 in each sum."""


def reaches(value: float, threshold: float, summed: float = 0.0) -> bool:
    """Returns whether a sum of floats is the threshold or more, but for rounding. summed: the absolute values that were
    added, in all, where they are larger than their sum."""
    return value >= threshold - ROUNDING * max(abs(value), abs(threshold), summed)


def pass_problems(config: "Config") -> Iterator[Problem]:
    """Yields a warning for each held-out set with pass@k of which no answer can pass, as far as the largest reward is
    known. Functions of the user are taken to give at most 1, and the warning says so."""
    threshold, by_model = config.evaluate.pass_reward, bool(config.reward.model)
    for each in config.evaluate.held_out:
        functions = each.functions or config.reward.functions
        is_open = any(one.use == ENVIRONMENT or one.by_token for one in functions) or (by_model and not each.functions)
        named = [one for one in functions if one.term == each.pass_term]
        tests = [one for one in functions if one.term == TESTS and not each.pass_term]
        if each.samples == 1 or not functions or is_open or (each.pass_term and not named):
            continue
        counted = named or tests or functions
        factors = [1.0 if named or tests else one.weight for one in counted]
        most = [_most(one.use, factor) for one, factor in zip(counted, factors, strict=True)]
        if reaches(sum(most), threshold, sum(map(abs, factors))):
            continue
        own = [one.use for one in counted if ":" in one.use]
        unless = f"if {' and '.join(own)} give{'s' if len(own) == 1 else ''} at most 1, " if own else ""
        what = f"the term {counted[0].term}" if named or tests else "the sum of the weighted terms"
        best = max(functions, key=lambda one: one.weight).term
        text = (
            f"{unless}no answer can pass, and pass@k stays 0: {what} is at most {sum(most):g}, and "
            f'evaluate.pass_reward is {threshold:g}; write {each.section}.pass_term = "{best}", the name of a term, or '
            f"a pass_reward that can be reached"
        )
        yield Problem(f"{each.section}.pass_term", "", text, is_warning=True)


def _most(use: str, weight: float) -> float:
    """Returns the most that a function adds to a reward; one of the user is taken to give 0 to 1."""
    low, high = (-1.0, 0.0) if use in PENALTIES else (0.0, 1.0)
    return max(weight * low, weight * high)
