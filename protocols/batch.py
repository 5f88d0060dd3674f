"""Rows and references to rows, and the columns of the rows that services store.

A `Batch` holds rows: named ragged columns, no padding. A `BatchRef` says where rows are stored; the controller passes
references only. Both, and `Cuts`, are divisible by rows, which is all that a transfer protocol needs: `take` returns
these rows, in this order; `row_weights` returns the cost of each (tokens), for balanced splitting; `join` returns the
rows of all parts, in order, and so undoes taking consecutive ranges.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SampleName = tuple[int, int, int]
"""Group, member and attempt: identifies a sample, and is never used twice in a run."""

NO_ROOM = "token_limit"
"""Finish reason of an episode without room for what its environment said and one more token."""
CUT = "length"
LATE = "deadline"
"""Names of what ends an answer in the midst: generation.max_new_tokens, generation.deadline."""

LARGEST_REWARD = 1e30
"""Sums and squares of a step's rewards stay finite, and each fits into a float32."""
GREEDY = -1
"""Member of a group's greedy answer, sampled at temperature 0. The answer is no sample: only its reward is used."""


def is_divisible(value: Any) -> bool:
    """Returns whether a transfer protocol splits this argument."""
    return hasattr(type(value), "row_weights")


@dataclass(frozen=True, slots=True)
class Column:
    """A ragged column: row i is values[offsets[i]:offsets[i + 1]]. values: [total] of any dtype; offsets: int64
    [rows + 1], rising from 0 to total."""

    values: Array
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.values.ndim != 1 or self.offsets.ndim != 1 or len(self.offsets) == 0:
            raise ValueError("a column is one-dimensional and has at least one offset")
        offsets = self.offsets
        if offsets[0] != 0 or offsets[-1] != len(self.values) or (offsets[1:] < offsets[:-1]).any():
            raise ValueError("column offsets must rise from 0 to the number of values")

    @classmethod
    def of(cls, rows: Sequence[Array], dtype: Any = None) -> Self:
        values = np.concatenate(rows, dtype=dtype, casting="unsafe") if rows else np.zeros(0, dtype)
        return cls(values, np.fromiter(accumulate(map(len, rows), initial=0), np.int64, len(rows) + 1))

    @classmethod
    def join(cls, parts: Sequence["Column"]) -> Self:
        lengths = np.concatenate([[0], *[part.lengths() for part in parts]])
        return cls(np.concatenate([part.values for part in parts]), np.cumsum(lengths, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self.values[start:end] for start, end in pairwise(self.offsets.tolist()))

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def take(self, rows: Sequence[int]) -> "Column":
        """Returns these rows, without a copy where they follow each other."""
        within = len(rows) > 0 and rows[0] >= 0 and rows[-1] < len(self)
        if not within or any(later != row + 1 for row, later in pairwise(rows)):
            return Column.of([self[row] for row in rows], self.values.dtype)
        offsets = self.offsets[rows[0] : rows[-1] + 2]
        return Column(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])


@dataclass(frozen=True, slots=True)
class Batch:
    """Named ragged columns of equal row count."""

    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        if len({len(column) for column in self.columns.values()}) > 1:
            sizes = {name: len(column) for name, column in self.columns.items()}
            raise ValueError(f"columns of one batch differ in their number of rows: {sizes}")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> Column:
        if name not in self.columns:
            raise KeyError(f"no column {name!r}; there are {sorted(self.columns)}")
        return self.columns[name]

    def row_weights(self) -> Sequence[int]:
        totals = np.zeros(len(self), np.int64)
        for column in self.columns.values():
            totals += column.lengths()
        return [int(total) for total in totals]

    def take(self, rows: Sequence[int]) -> "Batch":
        """Returns these rows, without a copy where they follow each other."""
        return Batch({name: column.take(rows) for name, column in self.columns.items()})

    @classmethod
    def join(cls, parts: Sequence["Batch"]) -> "Batch":
        names = list(parts[0].columns)
        if any(list(part.columns) != names for part in parts):
            raise ValueError(f"batches to join must have the same columns: {[list(p.columns) for p in parts]}")
        return cls({name: Column.join([part.columns[name] for part in parts]) for name in names})


class Place(NamedTuple):
    """A slot in the memory of the worker that owns the row.

    owner: its address (`shm://NAME`, `ipc://PATH`, `tcp://HOST:PORT`, `inproc://NAME`); it contains the owner's
    instance, so a restarted worker never answers for the rows of its predecessor. write_count: of the slot since this
    row was written; a reader refuses another one.
    """

    owner: str
    slot: int
    write_count: int
    columns: tuple[str, ...]


class RowRef(NamedTuple):
    """One sample, by reference, with the scalars that gate, baseline and metrics need. first, last: versions of its
    first and last sampled token, stamped by the engine. tokens: sampled tokens. finish: "stop" | "stop_string" |
    "length" | "abort", or why an episode ended; "" while it goes on. reward: None until scored, or unscorable. cost:
    only where the algorithm has one. turns: times that the policy was asked. given: tokens after the prompt that the
    environment wrote, between the sampled ones. cut, late: turns that generation.max_new_tokens and generation.deadline
    ended; limits of an episode are in neither. opened: the newest answer begins in thoughts. turn_rewards: of a scored
    episode of several turns, the parts of its reward; turn_advantages: in a batch, where turns have their own."""

    group: int
    member: int
    attempt: int
    incarnation: int
    prompt_tokens: int
    tokens: int
    first: int
    last: int
    finish: str
    places: tuple[Place, ...]
    reward: float | None = None
    advantage: float | None = None
    cost: float | None = None
    turns: int = 1
    given: int = 0
    turn_rewards: tuple[float, ...] = ()
    turn_advantages: tuple[float, ...] = ()
    cut: int = 0
    late: int = 0
    opened: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return (self.group, self.member)

    @property
    def name(self) -> SampleName:
        return (self.group, self.member, self.attempt)

    @property
    def truncated(self) -> bool:
        """Returns whether generation.max_new_tokens ended an answer of the sample."""
        return self.cut > 0 or (self.finish == CUT and not self.late)

    @property
    def unfinished(self) -> bool:
        """Returns whether an answer of the sample did not come to its end."""
        return self.truncated or self.late > 0

    @property
    def length(self) -> int:
        """Returns the tokens of the whole row: prompt, sampled and given."""
        return self.prompt_tokens + self.tokens + self.given

    def stored_at(self, *places: Place) -> "RowRef":
        """Adds places of the same sample: further columns, made by another service."""
        return self.with_places(tuple(dict.fromkeys(self.places + places)))

    def with_places(self, places: tuple[Place, ...]) -> "RowRef":
        return self._replace(places=places)

    def with_reward(
        self, reward: float | None, cost: float | None = None, turn_rewards: tuple[float, ...] = ()
    ) -> "RowRef":
        return self._replace(reward=reward, cost=cost, turn_rewards=turn_rewards)

    def with_advantage(self, advantage: float, turn_advantages: tuple[float, ...] = ()) -> "RowRef":
        return self._replace(advantage=advantage, turn_advantages=turn_advantages)

    def place_of(self, column: str) -> Place:
        for place in self.places:
            if column in place.columns:
                return place
        raise KeyError(f"sample {self.key} has no column {column!r}")


@dataclass(frozen=True, slots=True)
class BatchRef:
    """References to rows; divisible like the rows themselves."""

    rows: tuple[RowRef, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[RowRef]:
        return iter(self.rows)

    def row_weights(self) -> Sequence[int]:
        return [row.length for row in self.rows]

    def take(self, rows: Sequence[int]) -> "BatchRef":
        return BatchRef(tuple([self.rows[row] for row in rows]))

    @classmethod
    def join(cls, parts: Sequence["BatchRef"]) -> "BatchRef":
        return cls(tuple(row for part in parts for row in part.rows))

    def also_at(self, other: "BatchRef") -> "BatchRef":
        """Adds the places of row i of `other`, the same samples, to row i."""
        return BatchRef(tuple([row.stored_at(*same.places) for row, same in zip(self, other, strict=True)]))

    def with_places(self, places: Iterable[Place]) -> "BatchRef":
        """Adds places[i] to row i."""
        return BatchRef(tuple([row.stored_at(place) for row, place in zip(self, places, strict=True)]))


@dataclass(frozen=True, slots=True)
class Cuts:
    """The batch of one training iteration: samples by reference, sorted by (group, member), with advantages.

    incarnation, version: the trainer's state this step starts from; the step is refused at any other one. tokens,
    samples: denominators of the whole batch (all response tokens, all samples), the same on every rank. shown: (group,
    member) of samples of the whole batch of which the trainer reports the numbers of each token.
    """

    incarnation: int
    version: int
    batch: BatchRef
    tokens: int
    samples: int
    shown: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.batch)

    def row_weights(self) -> Sequence[int]:
        return self.batch.row_weights()

    def take(self, rows: Sequence[int]) -> "Cuts":
        return replace(self, batch=self.batch.take(rows))

    @classmethod
    def join(cls, parts: Sequence["Cuts"]) -> "Cuts":
        return replace(parts[0], batch=BatchRef.join([part.batch for part in parts]))


# ---- columns of stored rows: dtypes and, for given numbers of tokens, lengths --------------------------------------


Columns = dict[str, tuple[np.dtype[Any], int]]
"""Column -> dtype and length."""

SPANS = "spans"
"""The column that tells sampled tokens from given ones, only in rows of episodes."""

EXPERTS = "experts"
"""The column of the experts that routers chose, only with `training.router_replay`."""

TOKEN_REWARDS = "token_rewards"
"""The column of rewards of single tokens, only where reward functions give them and a critic is trained."""

IDS, NUMBERS, BYTES, COUNT = (np.dtype(name) for name in ("<i4", "<f4", "u1", "<i8"))


def sample_columns(prompt: int, response: int, text: int) -> Columns:
    """Returns what generation stores of a sample. text: bytes of the completion."""
    return {
        "prompt_ids": (IDS, prompt),
        "response_ids": (IDS, response),
        "logprobs": (NUMBERS, response),
        "versions": (IDS, response),
        "text": (BYTES, text),
    }


def trajectory_columns(turns: int, transcript: int) -> Columns:
    """Returns what the row of an episode has besides. spans: for each turn, the tokens sampled and those given after
    it; response_ids has all of them, in order, and every other column of tokens has one entry for a sampled token. A
    negative number of given tokens: these begin a new context, in which the policy sees nothing of before. transcript:
    bytes of the messages after the prompt, as JSON. turn_rewards: of the environment."""
    return {SPANS: (IDS, 2 * turns), "transcript": (BYTES, transcript), "turn_rewards": (NUMBERS, turns)}


def expert_columns(tokens: int, dtype: np.dtype[Any], width: int) -> Columns:
    """Returns what generation stores of the experts of a row: `width` numbers for each token of prompt and response, as
    asyncrl/engines/models/model_families.py has them."""
    return {EXPERTS: (dtype, tokens * width)}


def sampled_places(spans: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns the indices of the sampled tokens in `response_ids`, int64 [sampled]."""
    return np.flatnonzero(np.repeat(np.arange(len(spans)) % 2 == 0, np.abs(spans)))


def episode_columns(prompt: int, response: int, text: int, turns: int, transcript: int) -> Columns:
    """Returns what the environment stores of a sample."""
    return sample_columns(prompt, response, text) | trajectory_columns(turns, transcript)


def reference_columns(response: int) -> Columns:
    return {"reference_logprobs": (NUMBERS, response)}


def token_reward_columns(response: int) -> Columns:
    """Returns what the reward service stores: the parts of a reward that belong to single sampled tokens."""
    return {TOKEN_REWARDS: (NUMBERS, response)}


def restored_columns(prompt: int, response: int, text: int) -> Columns:
    """Returns what generation stores at most of a sample that a resume restores: the columns of all services."""
    own = sample_columns(prompt, response, text) | reference_columns(response) | token_reward_columns(response)
    values = value_columns("values", "valued_at", response)
    return own | values | value_columns("cost_values", "cost_valued_at", response)


def value_columns(values: str, valued_at: str, response: int) -> Columns:
    """Returns what a critic stores: a value for each token, and the number of its updates before."""
    return {values: (NUMBERS, response), valued_at: (COUNT, 1)}
