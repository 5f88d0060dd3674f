"""Admission by feedback: how many samples may be on their way to the trainer, below the hard bound of the gate.

    the trainer is free ──> too few usable samples:       the bound rises at once by what is missing
                        └─> usable samples are left over: the bound falls slowly by what is left each time

A sample that waits READY gets older with each step and gains nothing. So the bound settles where the trainer just finds
its batch: at the samples that it takes in the time from a draw to READY, and never below one batch. Neither that rate
nor that time is measured: what is missing or left when the trainer is free is the error of the product of both. Pure:
what happened is passed in, and there is no clock.
"""

from collections import deque

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.gate.group_state import Pick

WINDOW = 8
"""Batches in a row that the trainer must have found with samples left over before the bound falls."""
FALL = 0.5
"""Share of the samples left over by which the bound falls: half, because the next batches may come later."""
MARGIN = 0.5
"""Samples that stay left over, as a share of how much their number varied: with none left the next late batch would
let the trainer wait."""


class Admission:
    """Bounds the samples that are drawn and not in training yet, those that `mask` lets run past the limit left out.

    bound: starts at one batch and what the engines decode together, and at least two batches; it stays between one
    batch and the credits of the gate. In lockstep it is one batch, without admission the credits.
    """

    def __init__(self, config: GateConfig) -> None:
        self._config = config
        self.bound = config.batch if config.admission == "lockstep" else config.credits
        if config.admission == "adaptive":
            self.bound = min(config.credits, config.batch + max(config.batch, config.slots))
        self._left = deque[int](maxlen=WINDOW)
        self._starving = False

    def allows(self, waiting: int) -> bool:
        """Returns whether a further group may be drawn. waiting: samples in flight that are not in training."""
        return waiting < self.bound

    def observe(self, pick: Pick, offered: int) -> None:
        """Takes every answer of `Gate.pick`. offered: samples that could train and were not taken."""
        if self._config.admission != "adaptive":
            return
        if pick.cuts is None:
            self._starve(self._config.batch - offered, lost=bool(pick.dropped))
        elif self._starving:
            self._starving = False
        else:
            self._leave(offered)

    def _starve(self, missing: int, lost: bool) -> None:
        """Raises the bound once for each wait of the trainer, and again when samples that it waited for were lost."""
        if missing > 0 and (lost or not self._starving):
            self.bound = min(self._config.credits, self.bound + missing)
        self._starving = True
        self._left.clear()

    def _leave(self, left: int) -> None:
        self._left.append(left)
        if len(self._left) < WINDOW:
            return
        least = min(self._left)
        fall = int(FALL * (least - MARGIN * (max(self._left) - least)))
        if fall > 0:
            self.bound = max(self._config.batch, self.bound - fall)
            self._left.clear()
