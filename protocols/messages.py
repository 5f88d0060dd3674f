"""All messages that cross a wire: frozen dataclasses of plain values and arrays; references of rows, of which there are
most, are named tuples.

`WIRE_TYPES` is the closed list of what the codec encodes and decodes; nothing else is ever built from bytes.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.protocols.batch import Batch, BatchRef, Column, Cuts, Place, RowRef, SampleName
from asyncrl.protocols.prompt_row import PackedRow

# ---- hosts that join and the controller: offers, orders, and files that a host does not see ------------------------


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of the controller. name: relative to its folder, with "/". sha256: of its content, in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileTree:
    """Files of one folder of the controller. path: of the folder there. use: "folder" (workers read the folder),
    "files" (they read files by their paths), "module" (they import them by a name, so they have to be there), "run"
    (the run directory, where they write logs; the files tell whether it is the same) or "shared" (the run directory,
    where they write checkpoints, so it has to be there)."""

    path: str
    use: str
    files: tuple[ListedFile, ...]


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes of a file from the offset that a host asked for."""

    data: bytes
    crc32: int


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Host -> controller: an offer to run one worker of a service. agent: names the offer, and is used once. machine,
    memory, host: the identity of the host. versions: of installed packages. proof: of the key's secret. gpus: names of
    those that the host has. runs: the instance that outlived an earlier connection, "" for none."""

    service: str
    agent: str
    machine: str
    memory: str
    host: str
    versions: dict[str, str]
    proof: str
    gpus: list[str] = field(default_factory=list)
    runs: str = ""


@dataclass(frozen=True, slots=True)
class JoinOrder:
    """Controller -> host: what to do. kind: "fetch" (look for the files that the worker reads), "keep" (go on with the
    worker that runs), "start" (text: its specification), "stop", "terminate", "kill" (text: why, if it is known),
    "wait" (a sign of life) or "leave" (the run has ended, or wants this host no more: text says why)."""

    kind: str
    instance: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """Controller -> host that asks whether it could join. objection: why not, "" if it may. versions: of the
    controller's packages; packages: those that have to agree. ticket: for the parts that measure the connection."""

    objection: str
    versions: dict[str, str]
    packages: list[str]
    ticket: str


@dataclass(frozen=True, slots=True)
class Hello:
    """Caller -> worker: the first message on every link. protocol: version of this file's messages."""

    run: str
    incarnation: int
    service: str
    rank: int
    instance: str
    protocol: int
    asyncrl: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """Worker -> caller: the link is open. credit: calls that may be outstanding on this link."""

    instance: str
    credit: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Worker -> caller: the link is refused, with a reason that names both sides."""

    reason: str


@dataclass(frozen=True, slots=True)
class Call:
    """Caller -> worker: a call. deadline: seconds from arrival or the last answer. wants_answer: or a bare reply."""

    call: int
    method: str
    args: tuple[Any, ...]
    deadline: float
    wants_answer: bool = True


@dataclass(frozen=True, slots=True)
class Item:
    """Worker -> caller: one item of a stream."""

    call: int
    value: Any


@dataclass(frozen=True, slots=True)
class More:
    """Caller -> worker: this many items of a stream were consumed; as many more may be sent."""

    call: int
    items: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Worker -> caller: the result, or the end of a stream (value None)."""

    call: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """Worker -> caller: the call raised. lost: owner and slot of rows that it found lost."""

    call: int
    kind: str
    message: str
    service: str
    rank: int
    traceback: str
    lost: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """Caller -> worker: stop this call; no answer follows."""

    call: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Either way, when a link was silent for a heartbeat; any traffic counts as a sign of life."""

    number: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Worker -> caller: the worker makes progress with calls that wait. finished: parts of its work so far."""

    finished: int


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a worker. doing: what each running call does; seconds: by state since start, see telemetry; wall,
    cpu: seconds since start; memory: resident bytes of its process; version: of the weights in use, None where it has
    none of the policy's; gpu: of its GPU, see gpu_use."""

    service: str
    replica: int
    rank: int
    instance: str
    doing: tuple[str, ...]
    queued: int
    seconds: dict[str, float]
    wall: float
    counters: dict[str, float] = field(default_factory=dict)
    cpu: float = 0.0
    memory: int = 0
    version: int | None = None
    gpu: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Boundary:
    """Names where a pause, resume or abort takes effect. kind: "decode step" | "micro-batch" | "call"."""

    kind: str
    at: int

    @classmethod
    def merge(cls, parts: "list[Boundary]") -> "Boundary":
        return max(parts, key=lambda part: part.at)


SLACK_SHARE = 1.5
SLACK = 5.0
"""Time, as a share of a sample's deadline and in seconds, by which its end may be late: less than its call waits."""


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """A group to sample. prompt: text, or chat messages ({"role", "content"}); members: which samples of the group are
    wanted; seed: the group's, a member's is derived from it; not_before: start no sequence with older weights;
    deadline: seconds that a sample may hold a slot; continues: rows of these members, each an episode that goes on
    after what its environment answered last; tools: JSON schemas of functions that the model may call, for the chat
    template."""

    id: int
    attempt: int
    incarnation: int
    prompt: str | list[dict[str, Any]]
    members: tuple[int, ...]
    seed: int
    not_before: int
    temperature: float
    max_new_tokens: int
    deadline: float
    continues: BatchRef | None = None
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def longest_silence(self) -> float:
        """Returns the seconds after which a worker that finished no sample of any group is given up: the end of one may
        be late by less than its call waits."""
        return min(SLACK_SHARE * self.deadline, self.deadline + SLACK)


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of the episodes of a group. prompt: what the policy is asked first; tools: JSON schemas."""

    prompt: str | list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class SampleText:
    """One sample as text, for a person to read. turns: of an episode, its messages after the prompt ({"role",
    "content"}), the policy's as "assistant"; turn_rewards: of the environment, for each of those. token_ids,
    token_logprobs, token_versions: of each sampled token, with the version of the weights that sampled it. context: all
    that the policy saw before its newest turn. transitions: of a policy that acts, see acting/shown_transitions.py."""

    group: int
    member: int
    prompt: str
    text: str
    turns: list[dict[str, Any]] = field(default_factory=list)
    turn_rewards: tuple[float, ...] = ()
    context: str = ""
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    token_logprobs: tuple[float, ...] = ()
    token_versions: tuple[int, ...] = ()
    transitions: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a sample. reward: the weighted sum, None when unscorable; terms: each function's own value; error:
    why it is unscorable; turns: of an episode, what each turn added to the reward; () when nothing belongs to one.
    place: where the rewards of single tokens are stored, if the trainer reads them. bad_row: the row is why."""

    reward: float | None
    terms: dict[str, float]
    error: str = ""
    turns: tuple[float, ...] = ()
    place: Place | None = None
    bad_row: bool = False

    def by_turn(self, turns: int) -> tuple[float, ...]:
        """Returns the reward in parts, one for each of several turns; what belongs to no turn comes with the last."""
        if self.reward is None or turns == 1:
            return ()
        before = self.turns[:-1] or (0.0,) * (turns - 1)
        assert len(before) == turns - 1, f"a score with parts for {len(self.turns)} turns of an episode of {turns}"
        return (*before, self.reward - sum(before))


def with_cost(score: Score, cost: Score) -> Score:
    """Returns one score of a sample that needs both to be trained; terms of costs begin with `cost/`."""
    terms = score.terms | {f"cost/{name}": value for name, value in cost.terms.items()}
    error = "\n".join(each for each in (score.error, cost.error) if each)
    bad_row = score.bad_row or cost.bad_row
    return Score(None if cost.reward is None else score.reward, terms, error, score.turns, score.place, bad_row)


@dataclass(frozen=True, slots=True)
class Canary:
    """The trainer's log-probs at one version of the likeliest `tokens` after `prompt` (a few ids), in nats, the
    likeliest first. An engine that computes other log-probs with the same weights is at fault."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Published:
    """A version in a slot of a weight arena. digest: hex, of the piece of a tensor that `digest_of` names, or of the
    whole slot where that is "". readers: those that the version is leased to, which read it in place; None: a reader
    copies it out. canary: to compare with; None: the trainer has no model. transfer: seconds that readers may take to
    copy its bytes."""

    incarnation: int
    version: int
    arena: str
    slot: int
    digest: str
    digest_of: str = ""
    readers: tuple[str, ...] | None = None
    canary: Canary | None = None
    transfer: float = 0.0

    def is_kept_for(self, reader: str) -> bool:
        return self.readers is None or reader in self.readers

    @classmethod
    def merge(cls, parts: "list[Published]") -> "Published":
        return parts[0]  # The ranks of one trainer write one arena.


@dataclass(frozen=True, slots=True)
class Using:
    """Readers that from now on read only `version`. canary: the largest difference of a log-prob from the trainer's, in
    nats; None: it was not compared."""

    readers: tuple[str, ...]
    version: int
    canary: float | None = None

    @classmethod
    def merge(cls, parts: "list[Using]") -> "Using":
        readers = tuple(r for part in parts for r in part.readers)
        version = min(part.version for part in parts)
        return cls(readers, version, max((part.canary for part in parts if part.canary is not None), default=None))


LEFT_OUT = "left out"
CUT_SHORT = "cut short"
"""Reason of samples whose update was not taken because the run ends: they wait for its next start."""
"""The reason of a sample that a step was given and that no mask, rejection or update accounts for."""


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """The trainer's account of one sample. trained: response tokens in the loss of an update that was taken. masked:
    those left out, with the reason ("stale", "truncated", "not finite", CUT_SHORT, LEFT_OUT). rejected: tokens within
    the limit that the correction gave no weight. advantages, rewards: of each sampled token of a sample in Cuts.shown,
    where they differ from token to token."""

    group: int
    member: int
    attempt: int
    trained: int
    masked: int
    reason: str = ""
    rejected: int = 0
    advantages: tuple[float, ...] = ()
    rewards: tuple[float, ...] = ()

    @property
    def name(self) -> SampleName:
        return (self.group, self.member, self.attempt)

    @property
    def untrained_because(self) -> str:
        """Returns why no token of the sample entered the loss; "" when one did."""
        why = "rejected" if self.rejected else self.reason or LEFT_OUT
        return "" if self.trained else why


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of the trainer on one iteration. version: the trainer's after it. updates: optimizer steps taken; 0
    means that nothing was trained: `skipped` says why ("" | "stale" | "truncated" | "rejected" | "not finite") and the
    version stayed. chain: hex of the trainer's own hash chain, over the samples that entered the loss. metrics:
    `loss/...`, `policy/...`, `grad_norm`, `staleness/...` of tokens in the loss."""

    incarnation: int
    version: int
    updates: int
    skipped: str
    chain: str
    metrics: dict[str, float]
    samples: tuple[TrainedSample, ...]
    published: Published | None

    @classmethod
    def merge(cls, parts: "list[StepReport]") -> "StepReport":
        """Joins the samples of all ranks; the ranks agree on everything else, and the first one published."""
        facts = {(part.incarnation, part.version, part.updates, part.skipped, part.chain) for part in parts}
        assert len(facts) == 1, f"ranks that trained together report different steps: {sorted(facts)}"
        samples = tuple(sorted((s for p in parts for s in p.samples), key=lambda s: (s.group, s.member)))
        return replace(parts[0], samples=samples)


@dataclass(frozen=True, slots=True)
class ValueReport:
    """The report of a critic on the batch that trained the policy from `version`. updates: optimizer steps taken; 0:
    nothing was learnt, `skipped` says why ("" | "stale" | "not finite" | "rows lost" | "learnt before"). metrics:
    `critic/...`, of a cost critic `cost_critic/...`."""

    incarnation: int
    version: int
    updates: int
    skipped: str
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The files of a checkpoint: path below its directory -> sha256 hex. chain: the trainer's hash chain at this
    version, "" of a critic. ready: the samples whose rows are in the files."""

    version: int
    chain: str
    files: dict[str, str]
    ready: tuple[SampleName, ...] = ()

    @classmethod
    def merge(cls, parts: "list[Checkpointed]") -> "Checkpointed":
        """Joins what several workers wrote; version and chain are those of the first."""
        files = {path: digest for part in parts for path, digest in part.files.items()}
        return cls(parts[0].version, parts[0].chain, files, tuple(name for part in parts for name in part.ready))


@dataclass(frozen=True, slots=True)
class Profile:
    """A trace of a worker's torch operators. trace: gzipped, in the Chrome trace format. recorded: seconds in it.
    operators, kernels: name, calls and seconds of their own, the longest first, on the CPU and on a GPU."""

    trace: bytes
    recorded: float
    operators: list[tuple[str, int, float]]
    kernels: list[tuple[str, int, float]]


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """The weights, or parts, that a pipeline stage holds. tensors: by name, digest (XXH3) and Euclidean norm."""

    instance: str
    stage: int
    incarnation: int
    version: int
    tensors: dict[str, tuple[str, float]]


PROTOCOL = 40
_CONNECTION = (Hello, Welcome, Rejected, Call, Item, More, Reply, Failure, Cancel, Ping, Progress)
_SERVICES = (Health, Boundary, PromptGroup, Opening, SampleText, Score, Canary, Published, Using)
_TRAINING = (TrainedSample, StepReport, ValueReport, Checkpointed, HeldWeights)
_ROWS = (Place, RowRef, BatchRef, Cuts, Column, Batch, PackedRow)
_JOINING = (JoinRequest, JoinOrder, ListedFile, FileTree, FilePart, ProbeAnswer, Profile)
WIRE_TYPES: tuple[type, ...] = (*_CONNECTION, *_SERVICES, *_TRAINING, *_ROWS, *_JOINING)
"""The place of a type in this list is its tag on the wire."""
