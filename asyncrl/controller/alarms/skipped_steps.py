"""The alarm for training steps that train nothing, one after the other."""

from collections import deque

from asyncrl.controller.alarms.alarm import Alarm
from asyncrl.errors import NonFiniteLoss, OnlyTruncated
from asyncrl.protocols.batch import Cuts

LIMIT = 3
"""Skipped steps in a row, all for one reason, that end the run: a rare batch causes one, the run's settings three."""


class SkippedSteps:
    """Ends a run whose steps are skipped again and again for one reason."""

    def __init__(self) -> None:
        self._skips = Alarm(limit=LIMIT)
        self._reason = ""
        self._samples: deque[list[tuple[int, int]]] = deque(maxlen=LIMIT)

    def check(self, cuts: Cuts, reason: str) -> None:
        """Counts a step. reason: why the step was skipped; empty: it trained.

        Raises:
            OnlyTruncated, NonFiniteLoss: the last steps were all skipped for this reason.
        """
        if not reason or reason != self._reason:
            self._skips.clear()
            self._samples.clear()
        self._reason = reason
        if not reason:
            return
        self._skips.count()
        self._samples.append([row.key for row in cuts.batch])
        if not self._skips.ends_run:
            return
        where = f"{LIMIT} steps in a row from version {cuts.version}"
        if reason == "truncated":
            raise OnlyTruncated(
                f"{where} had no answer that came to its end, so algorithm.mask_truncated left nothing to train: write "
                "a larger generation.max_new_tokens, or mask_truncated = false"
            )
        if reason == "not finite":
            raise NonFiniteLoss(
                f"{where} had a loss or gradient that is not finite; their samples (group, member) were "
                f"{[key for keys in self._samples for key in keys]}. Try a smaller learning rate or max_grad_norm"
            )
