"""Makes scores of what reward functions return: which functions score a group, when it is complete, and the sums by
sample, turn and token."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import Config
from asyncrl.errors import RewardError
from asyncrl.protocols.messages import Score
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import BAD_ROW, FunctionResult, Sample
from asyncrl.rewards.templates import ENVIRONMENT, TEMPLATES

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

# Rewards for single tokens: when the trainer reads them, and what functions give each token of a sample.


Floats = NDArray[np.float64]


def reward_tokens(config: "Config") -> bool:
    """Returns whether some reward function gives each token a reward."""
    return any(function.by_token for function in config.reward.functions)


def stores_token_rewards(config: "Config") -> bool:
    """Returns whether the trainer reads the rewards of tokens. Without a critic their sum is compared."""
    return reward_tokens(config) and config.algorithm.advantage == "gae"


def token_rewards(sample: Sample, specs: Sequence[FunctionSpec], results: Sequence[FunctionResult]) -> Floats:
    """Returns the weighted sum of what the functions give each sampled token, float64 [tokens]."""
    found = np.zeros(sample.tokens)
    for spec, result in zip(specs, results, strict=True):
        if result.tokens:
            found += spec.weight * np.array(result.tokens)
    return found


def turn_sums(rewards: Floats, turn_tokens: Sequence[int] | NDArray[np.int32]) -> Floats:
    """Returns the sum of the rewards of each turn's tokens, float64 [turns]. Each turn has at least one token."""
    return np.add.reduceat(rewards, np.cumsum([0, *turn_tokens[:-1]]))


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


# Chooses the functions that score a group: those of the run, or those of its held-out set.


@dataclass(frozen=True, slots=True)
class ChosenFunctions:
    """Functions by their numbers in the pool. is_own: whether they belong to a held-out set, so that nothing else
    scores its samples."""

    specs: tuple[FunctionSpec, ...]
    first: int
    is_own: bool = False

    @property
    def single(self) -> list[int]:
        return [self.first + place for place, spec in enumerate(self.specs) if not spec.group]

    @property
    def grouped(self) -> list[int]:
        return [self.first + place for place, spec in enumerate(self.specs) if spec.group]


@dataclass(frozen=True, slots=True)
class FunctionChoice:
    """All functions of a reward worker. sets: of the held-out sets that have functions of their own."""

    config: Config
    run: ChosenFunctions
    sets: Mapping[str, ChosenFunctions]

    @classmethod
    def of(cls, config: Config, specs: Sequence[FunctionSpec], held_out: Mapping[str, Sequence[FunctionSpec]]) -> Self:
        """Numbers the functions. specs, held_out: in the order in which the pool has them."""
        sets = {}
        first = len(specs)
        for name, own in held_out.items():
            sets[name] = ChosenFunctions(tuple(own), first, is_own=True)
            first += len(own)
        return cls(config, ChosenFunctions(tuple(specs), 0), sets)

    def of_group(self, group: int) -> ChosenFunctions:
        """Returns the functions of a group. Those of the evaluation have negative ids."""
        return self.run if group >= 0 else self.sets.get(self.config.evaluate.set_of(group).name, self.run)

    def place(self, group: int) -> str:
        """Returns the name of a group in errors: its number, or that of its prompt in a held-out set. Prompts that are
        those of training hold nothing out."""
        if group >= 0:
            return f"group {group}"
        chosen = self.config.evaluate.set_of(group)
        config = self.config
        prompt = f"prompt {chosen.group(0) - group}" + (f" of {chosen.section}" if chosen.name else "")
        return f"held-out {prompt}" if chosen.prompts not in ("", config.task.prompts) else prompt

    def members(self, group: int) -> int:
        """Returns the number of samples of a group."""
        evaluate = self.config.evaluate
        return self.config.task.samples_per_prompt if group >= 0 else evaluate.set_of(group).samples


# Waits until all members of a group have arrived, for functions that score them against each other.


Key = tuple[int, int]
"""Group and attempt: members of different attempts are never scored together."""

GroupResults = list[list[FunctionResult]]
ScoreGroup = Callable[[list[Sample]], Coroutine[Any, Any, GroupResults]]
"""Scores the samples of a group, by member; returns the results of all functions for each sample."""


class _OpenGroup:
    def __init__(self) -> None:
        self.members: dict[int, Sample] = {}
        self.waiting = 0
        self.closed = asyncio.Event()
        self.scoring: asyncio.Task[GroupResults] | None = None


@dataclass(eq=False, slots=True)
class GroupBarrier:
    """Holds the groups that wait for members; the gate bounds their number. timeout: seconds after which the members
    that arrived are scored alone: when a group restarts, members that were trained before do not come again."""

    score: ScoreGroup
    timeout: float
    tasks: asyncio.TaskGroup
    _open: dict[Key, _OpenGroup] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._open)

    async def results(self, key: Key, expected: int, sample: Sample) -> list[FunctionResult]:
        """Returns the result of each function for this sample, once `expected` members of its group have arrived."""
        group = self._open.setdefault(key, _OpenGroup())
        group.members[sample.member] = sample
        group.waiting += 1
        try:
            if len(group.members) < expected:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.timeout):
                        await group.closed.wait()
            scoring = group.scoring or self._close(key, group)
            results = await asyncio.shield(scoring)
        finally:
            group.waiting -= 1
            if not group.waiting and self._open.get(key) is group:
                del self._open[key]
        return results[sorted(group.members).index(sample.member)]

    def _close(self, key: Key, group: _OpenGroup) -> asyncio.Task[GroupResults]:
        del self._open[key]
        group.scoring = self.tasks.create_task(self.score([group.members[member] for member in sorted(group.members)]))
        group.closed.set()
        return group.scoring
