"""Makes, reads and selects the records of `samples.jsonl`: completions, their rewards and what was trained of them."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl.protocols.batch import RowRef
from asyncrl.protocols.messages import SampleText, TrainedSample
from asyncrl.telemetry.jsonl import LineFile, read_lines, read_records

TOKEN_FIELDS = ("prompt_ids", "token_ids", "token_logprobs", "token_versions")
TRANSITIONS = "transitions"
"""Finish reason of a sample of a policy that acts: it has its transitions."""
BY_TOKEN = ("token_advantages", "token_rewards")
REMEMBERED_GROUPS = 4096
"""Groups of which a part may still be trained: more than are in flight in any run that we know."""
TOKENS_BY_TOKEN = 32_768
"""Tokens of a step with numbers of their own, some 20 bytes each in the report of the trainer."""


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One sample for a person to read.

    finish: why the completion ended; terms: each reward function's own value; first, last: versions that sampled its
    first and last token; trained, masked: response tokens in the loss and left out, with the reason; rejected: tokens
    that a correction gave no weight; skipped: why the whole step trained nothing. advantage: None also when a critic
    gives each token its own. turns, turn_rewards: of an episode, the messages after its prompt ({"role", "content"}),
    and what the environment gave for each of the policy's, whose role is "assistant". prompt_ids: tokens of the prompt;
    token_ids, token_logprobs, token_versions: of each sampled token, and token_advantages, token_rewards, where they
    differ from token to token. transitions: of a policy that acts: observation, action, logprob, reward, version, and
    ended where an episode did. The file lacks these nine where they are empty.
    """

    step: int
    incarnation: int
    group: int
    member: int
    attempt: int
    prompt: str
    text: str
    finish: str
    tokens: int
    reward: float | None
    terms: Mapping[str, float]
    advantage: float | None
    first: int
    last: int
    trained: int
    masked: int
    reason: str = ""
    rejected: int = 0
    skipped: str = ""
    turns: list[dict[str, Any]] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    token_advantages: list[float] = field(default_factory=list)
    token_rewards: list[float] = field(default_factory=list)
    transitions: list[dict[str, Any]] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        """Returns the fields that the file has."""
        absent = {*(() if self.turns else ("turns", "turn_rewards")), *(() if self.token_ids else TOKEN_FIELDS)}
        absent |= {name for name in (*BY_TOKEN, "transitions") if not getattr(self, name)}
        return {name: value for name, value in asdict(self).items() if name not in absent}


def sample_record(
    step: int, row: RowRef, text: SampleText, terms: Mapping[str, float], trained: TrainedSample, skipped: str = ""
) -> SampleRecord:
    """Combines what the engine, the reward and the trainer report about one sample."""
    assert row.key == (text.group, text.member) == (trained.group, trained.member)
    of_row = ("incarnation", "group", "member", "attempt", "finish", "tokens", "reward", "advantage", "first", "last")
    copied = {name: getattr(row, name) for name in of_row}
    copied |= {name: getattr(trained, name) for name in ("trained", "masked", "reason", "rejected")}
    copied |= {name: getattr(text, name) for name in ("prompt", "text", "turns", "transitions")}
    copied |= {name: list(getattr(text, name)) for name in ("turn_rewards", *TOKEN_FIELDS)}
    copied |= {"token_advantages": list(trained.advantages), "token_rewards": list(trained.rewards)}
    return SampleRecord(step=step, terms=terms, skipped=skipped, **copied)


def to_show(rows: Sequence[RowRef], count: int | Literal["all"]) -> list[RowRef]:
    """Returns about `count` of a step's samples: whole groups, so that siblings can be compared, evenly spread over the
    step. They are chosen by position, so without bias. One group is returned where all of its samples are more than
    `count`, and none for a count of 0."""
    if count == "all" or count >= len(rows):
        return list(rows)
    if not count:
        return []
    groups: dict[int, list[RowRef]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    by_group = list(groups.values())
    whole = max(1, count // max(map(len, by_group)))
    return [row for index in range(whole) for row in by_group[index * len(by_group) // whole]]


def shown_by_token(rows: Sequence[RowRef]) -> tuple[tuple[int, int], ...]:
    """Returns the keys of the first of these samples, with up to TOKENS_BY_TOKEN tokens in sum: of each of those tokens
    the trainer reports numbers with its step."""
    tokens = 0
    keys = []
    for row in rows:
        tokens += row.tokens
        if tokens > TOKENS_BY_TOKEN:
            break
        keys.append(row.key)
    return tuple(keys)


class RecordedGroups:
    """Chooses whose samples are recorded, about `count` of a step. A group of which a part was trained and recorded is
    recorded to its end; one of which the first part was not is left out, while there are others."""

    def __init__(self, count: int | Literal["all"]) -> None:
        self._count = count
        self._known: dict[int, bool] = {}

    def choose(self, rows: Sequence[RowRef]) -> list[RowRef]:
        """Returns the samples of a step to record."""
        if self._count == "all" or not self._count:
            return to_show(rows, self._count)
        begun = {group for group, recorded in self._known.items() if recorded}
        others = [row for row in rows if row.group not in begun]
        fresh = [row for row in others if row.group not in self._known]
        chosen = {row.group for row in to_show(fresh or others, self._count)} | begun
        for group in dict.fromkeys(row.group for row in rows):
            self._known.pop(group, None)
            self._known[group] = group in chosen
        while len(self._known) > REMEMBERED_GROUPS:
            del self._known[next(iter(self._known))]
        return [row for row in rows if row.group in chosen]


class SamplesFile:
    """Appends records to samples.jsonl. A file of more than `most` bytes loses every second of its steps, and of later
    ones as many, so that those that stay are spread evenly over the run."""

    def __init__(self, path: Path, most: int) -> None:
        self._path = path
        self._most = most
        self._lines = LineFile(path)
        self._every = 1

    def append(self, records: Sequence[SampleRecord]) -> None:
        """Writes the records of one step. Raises OSError."""
        for record in records:
            if record.step % self._every == 0:
                self._lines.append(record.fields())

    @property
    def is_full(self) -> bool:
        return self._lines.size > self._most

    def close(self) -> None:
        self._lines.close()

    def thin_out(self) -> None:
        """Writes the file anew with every second step that it has, which takes seconds. Raises OSError."""
        self._lines.close()
        steps = list(dict.fromkeys(line["step"] for line in read_lines(self._path)))
        kept = {step for step in steps if step % (2 * self._every) == 0} or set(steps[-1:])
        self._every *= 2
        unfinished = self._path.with_name(f"{self._path.name}.part")
        with closing(LineFile(unfinished)) as target:
            for line in read_lines(self._path):
                if line["step"] in kept:
                    target.append(line)
        unfinished.replace(self._path)
        self._lines = LineFile(self._path)


def read_samples(path: Path) -> list[SampleRecord]:
    """Returns the records of the surviving history: a step that a resumed run repeated, or that first trained nothing,
    counts once, as done last."""
    surviving: list[SampleRecord] = []
    for record in read_records(path, _sample_record):
        while surviving and _is_void(surviving[-1], record):
            surviving.pop()
        surviving.append(record)
    return surviving


def _is_void(before: SampleRecord, record: SampleRecord) -> bool:
    """Checks whether `before` is of a later step, or of an earlier attempt at the same step."""
    other_attempt = before.incarnation < record.incarnation or before.skipped != record.skipped
    return before.step > record.step or (before.step == record.step and other_attempt)


def _sample_record(**fields: Any) -> SampleRecord:
    """Makes the record of one line; older versions of asyncrl called the field `incarnation` `epoch`."""
    if "epoch" in fields:
        fields["incarnation"] = fields.pop("epoch")
    record = SampleRecord(**fields)
    if not (isinstance(record.step, int) and isinstance(record.incarnation, int)):  # By which records are ordered.
        raise TypeError("step and incarnation are no integers")
    return record


def select_samples(
    records: Sequence[SampleRecord],
    step: int | None = None,
    group: int | None = None,
    order: Literal["best", "worst"] | None = None,
    masked: bool = False,
    count: int = 8,
) -> list[SampleRecord]:
    """Returns the records to show; without a step, a group or an order those of the last step. masked: only those with
    tokens left out of the loss."""
    if step is None and group is None and not order and not masked:
        step = records[-1].step if records else None
    found = [
        record
        for record in records
        if (step is None or record.step == step)
        and (group is None or record.group == group)
        and (not masked or record.masked + record.rejected > 0)
    ]
    if order is not None:
        scored = [record for record in found if record.reward is not None]
        found = sorted(scored, key=lambda record: record.reward or 0.0, reverse=order == "best")
    return found[:count]
