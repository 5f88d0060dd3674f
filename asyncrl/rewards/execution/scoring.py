"""Sums the results of reward functions to the score of a sample."""

from collections.abc import Sequence
from typing import Literal

from asyncrl.errors import RewardError
from asyncrl.protocols.messages import Score
from asyncrl.rewards.execution.token_rewards import token_rewards, turn_sums
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import BAD_ROW, FunctionResult, Sample
from asyncrl.rewards.templates import ENVIRONMENT, TEMPLATES

OnError = Literal["fail", "zero", "ignore"]
EXCERPT = 200
"""Characters of a completion that an error quotes."""


def score_of(
    sample: Sample, specs: Sequence[FunctionSpec], results: Sequence[FunctionResult], on_error: OnError, place: str = ""
) -> Score:
    """Returns the weighted sum of the functions' values; terms are the values before weighting. on_error: for a
    function without a value, `fail` raises RewardError with function, sample and traceback, `zero` counts 0, and
    `ignore` makes the sample unscorable, so that it leaves the baseline and the loss. A row that a template of ours
    cannot score makes it so whatever on_error says, and an answer that one could not judge counts 0. place: what errors
    call the group of the sample; default: by its number."""
    terms: dict[str, float] = {}
    failures: list[str] = []
    effects: set[str] = set()
    total = 0.0
    for spec, result in zip(specs, results, strict=True):
        terms |= {f"{spec.name}/{name}": value for name, value in result.logged.items()}
        if result.reason:
            failures.append(failure_text(sample, spec, result, place or f"group {sample.group}"))
            effect = BAD_ROW if result.of_row else "zero" if result.unjudged else spec.on_error or on_error
            effects.add(effect)
            if effect == "zero":
                terms[spec.name] = 0.0
        elif isinstance(result.value, dict):
            terms |= {f"{spec.name}/{term}": value for term, value in result.value.items()}
            total += spec.weight * sum(result.value.values())
        else:
            assert result.value is not None
            terms[spec.name] = result.value
            total += spec.weight * result.value
    if "fail" in effects:
        raise RewardError("\n".join([*failures, _advice(specs, results)]))
    reward = None if effects & {"ignore", BAD_ROW} else total
    turns = _turns(sample, specs, results)
    return Score(reward, terms, "\n".join(failures), turns, bad_row=BAD_ROW in effects)


def _turns(sample: Sample, specs: Sequence[FunctionSpec], results: Sequence[FunctionResult]) -> tuple[float, ...]:
    """Returns what each turn added to the score: the weighted rewards of the environment, where they are part of it,
    and those of the turn's tokens."""
    scored = zip(specs, results, strict=True)
    weight = sum(spec.weight for spec, result in scored if spec.use == ENVIRONMENT and not result.reason)
    parts = [weight * reward for reward in sample.turn_rewards] if weight else []
    if sample.turn_tokens:
        of_tokens = turn_sums(token_rewards(sample, specs, results), sample.turn_tokens).tolist()
        parts = [own + more for own, more in zip(parts or [0.0] * len(of_tokens), of_tokens, strict=True)]
    return tuple(parts)


def _advice(specs: Sequence[FunctionSpec], results: Sequence[FunctionResult]) -> str:
    """Returns what to do about failures: code of the user is corrected, since a mistake in it would come again."""
    section = "cost" if specs[0].key.startswith("cost.") else "reward"
    go_on = f'{section}.on_error = "zero" or "ignore" lets the run go on'
    failed = [spec for spec, result in zip(specs, results, strict=True) if result.reason]
    functions = [spec for spec in failed if spec.key.endswith(".functions")]
    wrong = [spec.use for spec in functions if spec.is_users or not (":" in spec.use or spec.use in TEMPLATES)]
    return f"correct {' and '.join(wrong)} first; where single samples cannot be scored, {go_on}" if wrong else go_on


def failure_text(sample: Sample, spec: FunctionSpec, result: FunctionResult, place: str) -> str:
    """Returns which function failed on which sample or whole group, why and where."""
    kind = spec.key.partition(".")[0]
    size = result.failed_together
    if size:
        samples = f"the {size} samples" if size > 1 else "the only sample"
        whole = f"{kind} function {spec.use} on {samples} of {place}: {result.reason}"
        return "\n".join(filter(None, [whole, result.traceback.rstrip()]))
    quoted = sample.text if len(sample.text) <= EXCERPT else sample.text[:EXCERPT] + "..."
    where = f"{kind} function {spec.use} on member {sample.member} of {place}"
    lines = [f"{where}: {result.reason}", f"  completion: {quoted!r}"]
    return "\n".join([*lines, result.traceback.rstrip()] if result.traceback else lines)
