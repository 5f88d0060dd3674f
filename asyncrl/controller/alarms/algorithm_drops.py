"""The alarm for an algorithm that drops sample after sample and leaves nothing that can train."""

from collections import Counter

from asyncrl.controller.alarms.alarm import Alarm
from asyncrl.controller.observers.events import DroppedByAlgorithm, Event, SampleScored, StepDone
from asyncrl.errors import AlgorithmError

NAMED = 3
"""Reasons that the error names; an algorithm may give a new reason for each sample."""


class AlgorithmDrops:
    """Ends a run whose algorithm drops samples without a step, and without a group that can train, in between.

    limit: dropped samples in a row that end the run. baseline: ready samples that a group needs for its advantages.
    version: the trainer's version at the beginning.
    """

    def __init__(self, limit: int, baseline: int, version: int) -> None:
        self._drops = Alarm(limit=limit)
        self._baseline = baseline
        self._version = version
        self._reasons = Counter[str]()
        self._ready = Counter[int]()

    def observe(self, event: Event) -> None:
        """Raises AlgorithmError when as many samples as the limit were dropped in a row."""
        match event:
            case DroppedByAlgorithm(members=members, reason=reason):
                self._reasons[reason] += len(members)
                self._drops.count(len(members))
                if self._drops.ends_run:
                    raise AlgorithmError(self._message())
            case SampleScored(sample=sample, score=score) if score.reward is not None:
                self._ready[sample.group] += 1
                if self._ready[sample.group] >= self._baseline:
                    self._clear()
            case StepDone(report=report):
                self._version = report.version
                self._clear()
            case _:
                pass

    def _clear(self) -> None:
        self._drops.clear()
        self._reasons.clear()
        self._ready.clear()

    def _message(self) -> str:
        reasons = ", ".join(repr(reason) for reason, _ in self._reasons.most_common(NAMED))
        some = "some samples" if self._baseline == 1 else f"{self._baseline} samples or more"
        return (
            f"{self._drops.in_a_row} samples were dropped as {reasons} and none trained since step {self._version}: "
            "what an algorithm hands to `control.drop` never trains, so hand "
            f"{some} of some groups to `control.ready`"
        )
