"""The contracts of the services: declared once here, implemented in services/, called through typed handles.

A contract is a class whose methods carry `@endpoint`. Algorithms, handles and the simulation know contracts only.
A handle on a contract has the contract's own type, so a wrong argument fails the type check.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, ClassVar, Self, TypeVar

from asyncrl.protocols.batch import BatchRef, Cuts, SampleName
from asyncrl.protocols.distribute_collect import (
    ONE_OF,
    ONE_OF_BY_GROUP,
    ONE_OF_HOLDER,
    ONE_TO_ALL,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    TO_HOLDERS,
    Transfer,
    balanced,
)
from asyncrl.protocols.messages import (
    Boundary,
    Checkpointed,
    Health,
    HeldWeights,
    Opening,
    Profile,
    PromptGroup,
    Published,
    SampleText,
    Score,
    StepReport,
    Using,
    ValueReport,
)
from asyncrl.protocols.prompt_row import PackedRow

F = TypeVar("F", bound=Callable[..., Any])


class Lane(StrEnum):
    """Names the socket and task that carry a call. CONTROL is always answered, also while WORK is busy."""

    CONTROL = "control"
    WORK = "work"


class Idempotent(Enum):
    """Says whether the runtime may repeat a call whose answer was lost."""

    NO = "no"
    PURE = "pure"  # may run twice; the first matching answer wins
    BY_VERSION = "by version"  # a compare-and-set on (incarnation, version): repeating it is harmless


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """The declaration made by `@endpoint`.

    stream: whether the call yields items as they are ready. stores: whether it makes rows, which lie with the replica
    until they are released; frees: whether it releases them.
    """

    name: str
    transfer: Transfer
    lane: Lane
    idempotent: Idempotent
    stream: bool
    stores: bool = False
    frees: bool = False


def endpoint(
    transfer: Transfer,
    *,
    lane: Lane = Lane.WORK,
    idempotent: Idempotent = Idempotent.NO,
    stream: bool = False,
    stores: bool = False,
    frees: bool = False,
) -> Callable[[F], F]:
    """Declares a method of a service's contract as an endpoint, without changing its type."""

    def declare(method: F) -> F:
        spec = EndpointSpec(method.__name__, transfer, lane, idempotent, stream, stores, frees)
        method.__endpoint__ = spec  # type: ignore[attr-defined]
        return method

    return declare


class Contract:
    """Base of all contracts: the calls that every worker answers. endpoints: all declarations, by name."""

    endpoints: ClassVar[dict[str, EndpointSpec]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = {name: member.__endpoint__ for name, member in vars(cls).items() if hasattr(member, "__endpoint__")}
        cls.endpoints = {**cls.endpoints, **own}

    def replica_of(self, instance: str) -> Self:
        """Returns the replica of this instance: calls on it reach no other replica, and wait for none. Raises PeerLost
        when the instance was replaced."""
        return self

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.PURE)
    async def started(self) -> None:
        """Answers once the worker has loaded and takes work; raises what kept it from that."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.PURE)
    async def health(self) -> list[Health]:
        """Returns for each worker what it is doing now, and how its time was spent so far."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL)
    async def profile(self, seconds: float) -> list[Profile]:
        """Records the torch operators of each worker for so many seconds. Raises Refused where it computes without
        torch."""
        raise NotImplementedError

    @endpoint(TO_HOLDERS, lane=Lane.CONTROL, idempotent=Idempotent.PURE, frees=True)
    async def release(self, samples: list[SampleName], oldest: int) -> None:
        """Frees the rows of these samples in these attempts and earlier ones, and of all groups before `oldest`, the
        first group in flight. Rows that are stored elsewhere, or were freed before, are ignored."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.PURE)
    async def owner_lost(self, instance: str) -> None:
        """Notes that an instance is dead, or cut off: who waits for its rows need not wait until its silence shows."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.PURE)
    async def idle_because(self, state: str) -> None:
        """Books idle time from now on as `starved` (no input) or `blocked` (held back by the gate)."""
        raise NotImplementedError


Contract.endpoints = {
    name: member.__endpoint__ for name, member in vars(Contract).items() if hasattr(member, "__endpoint__")
}


class Generation(Contract):
    """Samples completions; keeps sampling while new weights arrive."""

    @endpoint(ONE_OF_HOLDER, idempotent=Idempotent.PURE, stream=True, stores=True)
    def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        """Yields the samples of a group as they finish: each item holds those finished since the item before. Closing
        the stream aborts the samples that still run. Episodes go on where their last turn was sampled, if it lives."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.BY_VERSION)
    async def use_weights(self, published: Published) -> Using:
        """Changes to these weights between two decode steps; answers when the old slot is no longer read. A reader that
        the version is not leased to keeps its weights, and is not among the readers of the answer."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.PURE)
    async def pause(self) -> Boundary:
        """Starts no further decode step until `resume`. Answers at once with the boundary."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.PURE)
    async def resume(self) -> Boundary:
        raise NotImplementedError

    @endpoint(ONE_OF, idempotent=Idempotent.PURE, stores=True)
    async def restore_rows(self, directory: str, samples: BatchRef) -> BatchRef:
        """Stores the rows again that `Training.save_rows` wrote into the checkpoint in `directory`. Returns those of
        these samples that it has: with all columns in one place, and of this incarnation."""
        raise NotImplementedError

    @endpoint(TO_HOLDERS, lane=Lane.CONTROL, idempotent=Idempotent.PURE)
    async def texts(self, refs: BatchRef) -> list[SampleText]:
        """Returns prompt, completion and decoded text of the samples that this worker holds; others are left out."""
        raise NotImplementedError


class Reward(Contract):
    """Scores samples with the user's functions, in children that can be killed."""

    @endpoint(ONE_OF, idempotent=Idempotent.PURE)
    async def score(self, samples: BatchRef, row: dict[str, Any] | PackedRow) -> list[Score]:
        """Returns the scores of samples of one group, in order. row: the row of their prompt. A group function is
        called when all members have arrived."""
        raise NotImplementedError


class GroupReward(Reward):
    """Rewards with functions of whole groups: the samples of a group have to meet in one replica."""

    @endpoint(ONE_OF_BY_GROUP, idempotent=Idempotent.PURE)
    async def score(self, samples: BatchRef, row: dict[str, Any] | PackedRow) -> list[Score]:
        raise NotImplementedError


class TokenReward(Reward):
    """Rewards of single tokens, which are stored as rows. The samples of a group meet in one replica, for functions of
    whole groups."""

    @endpoint(ONE_OF_BY_GROUP, idempotent=Idempotent.PURE, stores=True)
    async def score(self, samples: BatchRef, row: dict[str, Any] | PackedRow) -> list[Score]:
        raise NotImplementedError


class Environment(Contract):
    """Plays the other side of episodes: the user's environments, in children that can be killed."""

    @endpoint(ONE_OF_BY_GROUP, idempotent=Idempotent.PURE, stores=True)
    async def reset(self, prompts: PromptGroup, row: dict[str, Any] | PackedRow) -> Opening:
        """Begins an episode for each of the members, all with the seed of the group. row: the row of their prompt."""
        raise NotImplementedError

    @endpoint(ONE_OF_HOLDER, idempotent=Idempotent.PURE, stores=True)
    async def step(self, samples: BatchRef, row: dict[str, Any] | PackedRow) -> BatchRef:
        """Answers the newest turn of each sample. Returns the samples as rows of this worker, with all columns that
        they had and what the environment answered; `finish` is "" for those whose episode goes on. Asked again about a
        turn that was answered, it gives the same answer. An episode that this worker does not know is played again from
        its transcript."""
        raise NotImplementedError


class Reference(Contract):
    """Log-probabilities of a frozen model."""

    @endpoint(ONE_OF, idempotent=Idempotent.PURE, stores=True)
    async def logprobs(self, samples: BatchRef) -> BatchRef:
        """Returns the references with one more place each: column `reference_logprobs`, float32 [tokens]."""
        raise NotImplementedError


class Critic(Contract):
    """Values of tokens, by a model that learns from the batches which train the policy. There is one replica of it."""

    @endpoint(ONE_OF, idempotent=Idempotent.PURE, stores=True)
    async def values(self, samples: BatchRef) -> BatchRef:
        """Returns the references with one more place each: column `values` float32 [tokens], of the states before each
        token was sampled, and `valued_at` int64 [1], updates taken until then. Asked again, newer values."""
        raise NotImplementedError

    @endpoint(ONE_OF, idempotent=Idempotent.BY_VERSION)
    async def update(self, cuts: Cuts) -> ValueReport:
        """Learns from the batch that trains the policy from (cuts.incarnation, cuts.version): a call that is repeated
        gets the stored report, a batch of an earlier version is Refused. Rows that are gone are no error: the report
        says so."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.PURE)
    async def undo_update(self) -> None:
        """Ends the running update after its pass, for a last checkpoint, and begins no other one. An update that has
        begun to change the weights is finished."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, idempotent=Idempotent.BY_VERSION)
    async def copy_state(self, incarnation: int, version: int) -> None:
        """Copies model and optimizer into the memory of the host, for a checkpoint of `version`."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, idempotent=Idempotent.BY_VERSION)
    async def checkpoint(self, directory: str, incarnation: int, version: int) -> Checkpointed:
        """Writes what `copy_state` copied below `directory`/critic, fsynced, while updates go on; answers with file
        digests."""
        raise NotImplementedError


UNDONE = "undone"
RUNNING = "running"
ENDED = "ended"
"""Answers of a rank that is asked to undo a step."""


class Training(Contract):
    """Trains the policy; publishes each new version into the weight arena."""

    @endpoint(balanced(THREE_D_PROTO), idempotent=Idempotent.BY_VERSION)
    async def step(self, cuts: Cuts) -> StepReport:
        """Trains one iteration, each rank on rows of about as many tokens. A compare-and-set on (cuts.incarnation,
        cuts.version); raises Refused elsewhere, and LostRows, with nothing changed, when rows are gone."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.BY_VERSION)
    async def allow_update(self, incarnation: int, version: int) -> None:
        """Lets the step from a version change the weights. Only a step in lockstep waits for it: its passes are
        computed before, while the next batch is sampled."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.BY_VERSION)
    async def undo_step(self, incarnation: int, version: int) -> list[str]:
        """Keeps the state of `version` for a last checkpoint: no update is taken from there any more. Returns for each
        rank UNDONE, RUNNING where its step is about to change the weights or has begun to, and then takes no further
        update, or ENDED where it has another version. One UNDONE is enough: ranks take updates together."""
        raise NotImplementedError

    @endpoint(balanced(THREE_D_PROTO), idempotent=Idempotent.PURE)
    async def prefetch(self, samples: BatchRef) -> list[bool]:
        """Reads the rows that the next `step` will probably train, while this step runs. Returns for each sample
        whether its row is held until the next `prefetch`."""
        return [False] * len(samples)

    @endpoint(THREE_D_PP_ONLY, idempotent=Idempotent.PURE)
    async def held_weights(self) -> list[HeldWeights]:
        """Returns for each pipeline stage the digests and norms of its weights, between two steps. Raises Refused while
        a step runs that nobody waits for."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.BY_VERSION)
    async def published(self) -> Published:
        """Returns the newest version in the weight arena, which a late joiner attaches to."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.BY_VERSION)
    async def using(self, readers: tuple[str, ...], version: int) -> None:
        """Notes that readers now read only `version`; the first call with a reader attaches it. Raises Refused, for all
        readers that read an older version, when the arena does not hold it (any more)."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.PURE)
    async def detached(self, reader: str) -> None:
        """Ends the leases of a reader whose process has ended."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, idempotent=Idempotent.BY_VERSION)
    async def copy_state(self, incarnation: int, version: int) -> None:
        """Copies model, optimizer and RNG state of `version` into the memory of the host, for a checkpoint, while no
        step runs. What ranks share out, the first gathers."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, idempotent=Idempotent.BY_VERSION)
    async def checkpoint(self, directory: str, incarnation: int, version: int) -> Checkpointed:
        """Writes what `copy_state` copied into `directory`, fsynced, while steps go on; answers with file digests. What
        all ranks share is written by the first. Raises Refused where no copy of `version` is held."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, idempotent=Idempotent.PURE)
    async def save_rows(self, directory: str, samples: BatchRef) -> Checkpointed:
        """Writes the rows of these samples into `directory`, fsynced, by the first rank; answers with the digest of the
        file, and with the samples in it. Rows that are gone are left out, and so is what exceeds the size of a file."""
        raise NotImplementedError
