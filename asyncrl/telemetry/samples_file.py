"""`samples.jsonl`: what the model wrote, what it got for it, and which of it was trained."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from asyncrl.protocols.batch import RowRef
from asyncrl.protocols.messages import SampleText, TrainedSample
from asyncrl.telemetry.lines import LineFile, read_records

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One sample as a person looks at it.

    finish: why the completion ended; terms: each reward function's own value; first, last: versions that sampled its
    first and last token; trained, masked: response tokens in the loss and left out, with the reason; rejected: those
    of neither, that a correction gave no weight; skipped: why the whole step trained nothing. advantage: None also
    where a critic gives each token its own.
    """

    step: int
    epoch: int
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


def sample_record(
    step: int, row: RowRef, text: SampleText, terms: Mapping[str, float], trained: TrainedSample, skipped: str = ""
) -> SampleRecord:
    """Put together what the engine, the reward and the trainer say about one sample."""
    assert row.key == (text.group, text.member) == (trained.group, trained.member)
    return SampleRecord(
        step=step,
        epoch=row.epoch,
        group=row.group,
        member=row.member,
        attempt=row.attempt,
        prompt=text.prompt,
        text=text.text,
        finish=row.finish,
        tokens=row.tokens,
        reward=row.reward,
        terms=terms,
        advantage=row.advantage,
        first=row.first,
        last=row.last,
        trained=trained.trained,
        masked=trained.masked,
        reason=trained.reason,
        rejected=trained.rejected,
        skipped=skipped,
    )


def to_show(samples: Sequence[T], count: int | Literal["all"]) -> list[T]:
    """`count` of a step's samples, evenly spread over its groups; chosen by place, so that no kind is favoured."""
    if count == "all" or count >= len(samples):
        return list(samples)
    return [samples[index * len(samples) // count] for index in range(count)]


class SamplesFile:
    """Writes `samples.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def write(self, records: Iterable[SampleRecord]) -> None:
        for record in records:
            self._file.append(asdict(record))

    def close(self) -> None:
        self._file.close()


def read_samples(path: Path) -> list[SampleRecord]:
    """Every record of the surviving history: steps that a resumed run did again, or that trained nothing at first,
    count once, as done last."""
    surviving: list[SampleRecord] = []
    for record in read_records(path, SampleRecord):
        while surviving and (surviving[-1].step > record.step or _older(surviving[-1], record)):
            surviving.pop()
        surviving.append(record)
    return surviving


def _older(before: SampleRecord, record: SampleRecord) -> bool:
    """Of an earlier try of the same step."""
    return before.step == record.step and (before.epoch < record.epoch or before.skipped != record.skipped)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which samples to look at. masked: only those with tokens left out of the loss."""

    step: int | None = None
    group: int | None = None
    order: Literal["best", "worst"] | None = None
    masked: bool = False
    count: int = 8

    def of(self, records: Sequence[SampleRecord]) -> list[SampleRecord]:
        """Without a step or group, those of the last step."""
        step = self.step
        if step is None and self.group is None and not self.order and not self.masked:
            step = records[-1].step if records else None
        kept = [
            record
            for record in records
            if (step is None or record.step == step)
            and (self.group is None or record.group == self.group)
            and (not self.masked or record.masked + record.rejected > 0)
        ]
        return self._sorted(kept)[: self.count]

    def _sorted(self, records: list[SampleRecord]) -> list[SampleRecord]:
        if self.order is None:
            return records
        scored = [record for record in records if record.reward is not None]
        return sorted(scored, key=lambda record: record.reward or 0.0, reverse=self.order == "best")
