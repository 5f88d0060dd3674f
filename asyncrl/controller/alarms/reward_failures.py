"""The alarm for samples that no reward function could score."""

from collections.abc import Callable

from asyncrl.controller.alarms.alarm import Alarm
from asyncrl.controller.observers.events import Event, SampleScored
from asyncrl.errors import RewardError


class RewardFailures:
    """Reports the first failed score of a run, and ends a run in which nothing can be scored.

    limit: samples in a row without a reward that end the run. say: shows a text to the user.
    """

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        self._say = say
        self.failed = Alarm(reported=1)
        self._unscored = Alarm(limit=limit)

    def observe(self, event: Event) -> None:
        """Raises RewardError when as many samples in a row as the limit have no reward."""
        if not isinstance(event, SampleScored):
            return
        score = event.score
        if score.error and self.failed.count():
            logs = "logs/cost*.jsonl" if score.error.startswith("cost") else "logs/reward*.jsonl"
            self._say(f"a reward failed, the run goes on; further failures are in {logs}:\n{score.error}")
        if score.reward is not None:
            self._unscored.clear()
            return
        self._unscored.count()
        if self._unscored.ends_run:
            unscored = self._unscored.in_a_row
            raise RewardError(f"the last {unscored} samples could not be scored; the last one:\n{score.error}")
