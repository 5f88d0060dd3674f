"""The rows of a training batch: the columns that an algorithm reads, the rows made of them, the targets of critics in
each row, and the contexts of the rows of episodes."""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import AlgorithmConfig, Config, CriticConfig
from asyncrl.engines.models.prompt_pictures import PromptPictures
from asyncrl.protocols.batch import (
    EXPERTS,
    GREEDY,
    SPANS,
    TOKEN_REWARDS,
    Batch,
    BatchRef,
    Cuts,
    RowRef,
    SampleName,
    sampled_places,
)
from asyncrl.rewards.execution.scoring import stores_token_rewards, turn_sums

Ids: TypeAlias = NDArray[np.int64]
"""Token ids [tokens]."""

REFERENCE = "reference_logprobs"


@dataclass(frozen=True, slots=True)
class TrainRow:
    """Holds one sample as training reads it. Arrays are one-dimensional; [tokens] counts sampled tokens only.

    group, member, attempt: identify the sample. prompt_ids [prompt], response_ids [sampled and given tokens]: token
    ids. logprobs [tokens]: of the engine that sampled, at `temperature`. versions [tokens]: weight version of
    `incarnation` that sampled each token. reference_logprobs [tokens]: of the frozen reference model, only with a KL
    term. spans [2 x turns]: of an episode, see `trajectory_columns`; None: all tokens of the response were sampled.
    truncated: an answer of it is unfinished. advantage: one number for all tokens, or float64 [tokens]; with a critic
    it is the reward of the sample, of which rewards [tokens] has the parts of turns and single tokens where they came.
    values [tokens]: of the critic, before each token was sampled. valued_at: optimizer steps that the critic had taken
    by then. cost, cost_values, cost_valued_at: the same for the cost. is_shown: the step reports what each token has.
    experts: that generation chose for all tokens, flat, as RecordShape has them; None: routers choose. pictures: of
    the prompt.
    """

    group: int
    member: int
    attempt: int
    incarnation: int
    prompt_ids: NDArray[np.int64]
    response_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    advantage: float | NDArray[np.float64]
    temperature: float = 1.0
    truncated: bool = False
    spans: NDArray[np.int32] | None = None
    reference_logprobs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    valued_at: int = 0
    rewards: NDArray[np.float64] | None = None
    cost: float | None = None
    cost_values: NDArray[np.float32] | None = None
    cost_valued_at: int = 0
    pictures: PromptPictures | None = None
    is_shown: bool = False
    experts: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        tokens = len(self.response_ids)
        assert len(self.prompt_ids) > 0, f"sample {self.key} has no prompt token"
        if self.spans is not None:
            assert np.abs(self.spans).sum() == tokens, f"sample {self.key}: spans {self.spans} are not {tokens} tokens"
            tokens = int(self.spans[::2].sum())
        assert tokens > 0, f"sample {self.key} has no response token"
        assert len(self.logprobs) == len(self.versions) == tokens, f"sample {self.key}: columns differ in length"

    @property
    def key(self) -> SampleName:
        return (self.group, self.member, self.attempt)


@dataclass(frozen=True, slots=True)
class ValueTarget:
    """Names what a critic learns to predict, reward or cost. critic: name of its service, config section, checkpoint
    folder and metrics prefix. values, valued_at: the columns that it writes."""

    critic: Literal["critic", "cost_critic"]
    values: str
    valued_at: str

    def of(self, row: TrainRow) -> tuple[float, NDArray[np.float32], int]:
        """Returns score and values of a row, and the optimizer steps that the critic had taken when it valued it."""
        values, valued_at = (row.cost_values, row.cost_valued_at) if self is COST else (row.values, row.valued_at)
        score = row.cost if self is COST else row.advantage
        assert values is not None, f"sample {row.key} has no values of the {self.critic}"
        assert score is not None, f"sample {row.key} has no cost"
        return float(score), values, valued_at

    def settings(self, config: Config) -> CriticConfig:
        return config.cost_critic if self is COST else config.critic


REWARD = ValueTarget("critic", "values", "valued_at")
COST = ValueTarget("cost_critic", "cost_values", "cost_valued_at")
VALUED_AT = (REWARD.valued_at, COST.valued_at)
OPTIONAL = (REFERENCE, REWARD.values, COST.values, *VALUED_AT, SPANS, EXPERTS)


def value_targets_of(algorithm: AlgorithmConfig) -> list[ValueTarget]:
    """Returns the targets for which the algorithm has a critic."""
    if algorithm.advantage != "gae":
        return []
    return [REWARD] if algorithm.constraint == "none" else [REWARD, COST]


def token_columns(config: Config) -> list[str]:
    """Returns the columns that the forward pass of any model reads."""
    return ["prompt_ids", "response_ids", *([SPANS] if config.environment.use else [])]


def columns_of(config: Config) -> list[str]:
    """Returns the columns that the algorithm reads."""
    reference = [REFERENCE] if config.reference_by_service else []
    targets = value_targets_of(config.algorithm)
    plain = [*token_columns(config), "logprobs", "versions", *([EXPERTS] if config.training.router_replay else [])]
    by_token = [TOKEN_REWARDS] if stores_token_rewards(config) else []
    return [*plain, *reference, *by_token, *(column for each in targets for column in (each.values, each.valued_at))]


def train_rows(
    refs: BatchRef,
    batch: Batch,
    temperature: float,
    shown: Collection[tuple[int, int]] = (),
    pictures: Sequence[PromptPictures | None] = (),
) -> list[TrainRow]:
    """Joins the references of samples with their rows in `batch`, which has the same order, as `pictures` has; without
    any, no prompt has pictures. shown: see Cuts."""
    rows = []
    for index, ref in enumerate(refs):
        assert ref.advantage is not None, f"sample {ref.key} reached the trainer without an advantage"
        assert ref.member != GREEDY, f"the greedy answer of group {ref.group} reached the trainer; it is no sample"
        others: dict[str, Any] = {name: batch[name][index] for name in OPTIONAL if name in batch.columns}
        others |= {name: int(others[name][0]) for name in VALUED_AT if name in others}
        rewards = batch[TOKEN_REWARDS][index] if TOKEN_REWARDS in batch.columns else None
        others |= _by_token(ref, others.get(SPANS), rewards)
        rows.append(
            TrainRow(
                *ref.name,
                ref.incarnation,
                prompt_ids=batch["prompt_ids"][index].astype(np.int64),
                response_ids=batch["response_ids"][index].astype(np.int64),
                logprobs=batch["logprobs"][index],
                versions=batch["versions"][index].astype(np.int64),
                temperature=temperature,
                truncated=ref.unfinished,
                cost=ref.cost,
                pictures=pictures[index] if pictures else None,
                is_shown=ref.key in shown,
                **others,
            )
        )
    return rows


def _by_token(ref: RowRef, spans: NDArray[np.int32] | None, rewards: NDArray[np.float32] | None) -> dict[str, Any]:
    """Spreads what is known of turns over their sampled tokens: an advantage over all; to the last of them what the
    rewards of single tokens lack of the reward of the turn."""
    found: dict[str, Any] = {"advantage": ref.advantage}
    if rewards is not None:
        found["rewards"] = rewards.astype(np.float64)
    if spans is not None and ref.turn_advantages:
        found["advantage"] = np.repeat(np.array(ref.turn_advantages, np.float64), spans[::2])
    if spans is not None and ref.turn_rewards:
        found.setdefault("rewards", np.zeros(int(spans[::2].sum())))
        found["rewards"][np.cumsum(spans[::2]) - 1] += ref.turn_rewards - turn_sums(found["rewards"], spans[::2])
    return found


def batch_digest(cuts: Cuts) -> str:
    """Returns the sha256 (hex) of the samples of a step with their advantages, rewards of turns, and costs."""
    facts = [(row.name, row.advantage, row.cost, row.turn_advantages, row.turn_rewards) for row in cuts.batch]
    return hashlib.sha256(repr((cuts.incarnation, cuts.version, facts)).encode()).hexdigest()


# Splits rows into contexts: the conversations of an episode, of which the policy sees one at a time.
#
#     row         prompt | sampled | given | sampled || given | sampled
#     contexts    prompt | sampled | given | sampled
#                                            prompt  | sampled
#
# A model gets each context as a row of its own. The sampled tokens of a row keep their order.


Spans: TypeAlias = NDArray[np.int32] | None
"""The column `spans` of a row (see `trajectory_columns`); None where each token of the response was sampled."""
ALL_SAMPLED = slice(None)


class SampleRow(NamedTuple):
    """Holds what a model reads of a row that need not train; fields as in TrainRow."""

    prompt_ids: Ids
    response_ids: Ids
    temperature: float = 1.0
    spans: Spans = None
    experts: NDArray[Any] | None = None
    pictures: PromptPictures | None = None


ModelRow: TypeAlias = TrainRow | SampleRow


def model_rows(
    batch: Batch, temperature: float = 1.0, pictures: Sequence[PromptPictures | None] = ()
) -> list[SampleRow]:
    """Returns what a model reads of the rows of a batch."""
    columns = [batch[name] if name in batch.columns else [None] * len(batch) for name in (SPANS, EXPERTS)]
    return [
        SampleRow(prompt.astype(np.int64), response.astype(np.int64), temperature, spans, experts, seen)
        for prompt, response, spans, experts, seen in zip(
            batch["prompt_ids"], batch["response_ids"], *columns, pictures or [None] * len(batch), strict=True
        )
    ]


class Context(NamedTuple):
    """Holds token ids of a conversation. sampled: tokens of the response that the policy sampled; the others were given
    to it. experts: [tokens, numbers of a token], where they are recorded."""

    prompt: Ids
    response: Ids
    sampled: Ids | slice
    temperature: float
    experts: NDArray[Any] | None
    pictures: PromptPictures | None


def contexts_of(row: ModelRow) -> list[Context]:
    """Returns the contexts of a row, in the order in which they began."""
    experts = row.experts
    if experts is not None:
        experts = experts.reshape(len(row.prompt_ids) + len(row.response_ids), -1)
    if row.spans is None:
        return [Context(row.prompt_ids, row.response_ids, ALL_SAMPLED, row.temperature, experts, row.pictures)]
    assert row.pictures is None, "episodes have no pictures"
    ids = np.concatenate([row.prompt_ids, row.response_ids])
    found = []
    begin = 0
    for prompt, own in _spans_of_contexts(len(row.prompt_ids), row.spans):
        first = begin + prompt
        end = first + int(own.sum())
        part = None if experts is None else experts[begin:end]
        found.append(Context(ids[begin:first], ids[first:end], sampled_places(own), row.temperature, part, None))
        begin = end
    return found


def padded_sizes(rows: Sequence[ModelRow]) -> tuple[list[int], list[int]]:
    """Returns the tokens of the longest context of each row, and the number of its contexts."""
    sizes = [
        [len(row.prompt_ids) + len(row.response_ids)]
        if row.spans is None
        else [prompt + int(own.sum()) for prompt, own in _spans_of_contexts(len(row.prompt_ids), row.spans)]
        for row in rows
    ]
    return [max(own) for own in sizes], [len(own) for own in sizes]


def _spans_of_contexts(prompt: int, spans: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """Yields the tokens of the prompt of each context, and its spans. prompt: tokens of that of the row."""
    for own in np.split(spans, 2 * np.flatnonzero(spans[1::2] < 0) + 2):
        yield prompt, np.maximum(own, 0)
        prompt = -min(0, int(own[-1]))
