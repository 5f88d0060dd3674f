"""Says which answers pass: a threshold with room for the rounding of sums, and whether any answer can reach it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config.problems import Problem
from asyncrl.config.user_code import suggestion
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
    """Yields, for each held-out set with pass@k, that its rewards have no term of the name by which answers pass, or a
    warning that none can pass, as far as names and the largest reward are known. Functions of the user are taken to
    give at most 1, and the warning says so."""
    threshold = config.evaluate.pass_reward
    for each in config.evaluate.held_out:
        functions, key = each.functions or config.reward.functions, f"{each.section}.pass_term"
        names = [one.term for one in functions]
        deciding = [one for one in functions if one.term == (each.pass_term or TESTS)]
        if each.samples == 1 or not functions or (config.reward.model and not each.functions):
            continue
        if each.pass_term and not deciding:
            if each.pass_term.partition("/")[0] not in (*names, "overlong"):
                text = f"the rewards of these prompts have no term {each.pass_term}{suggestion(each.pass_term, names)}"
                yield Problem(key, "", text)
            continue
        parts = [(one, 1.0 if deciding else one.weight) for one in deciding or functions]
        most = sum(max(0.0, -weight if one.use in PENALTIES else weight) for one, weight in parts)
        is_open = any(one.use == ENVIRONMENT or one.by_token for one, _ in parts)
        if is_open or reaches(most, threshold, sum(abs(weight) for _, weight in parts)):
            continue
        own = " and ".join(one.use for one, _ in parts if ":" in one.use)
        unless = f"with values of {own} up to 1 " if own else ""
        what = f"the term {deciding[0].term}" if deciding else "the weighted sum of the terms"
        best = max(functions, key=lambda one: one.weight).term
        text = (
            f"{unless}no answer can pass, and pass@k stays 0: {what} is at most {most:g}, and evaluate.pass_reward is "
            f'{threshold:g}; write {key} = "{best}", the name of a term, or a pass_reward that can be reached'
        )
        yield Problem(key, "", text, is_warning=True)
