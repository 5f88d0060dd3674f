"""The alarm for groups that are dropped as poison: which group, why, and what to do about it."""

from collections.abc import Callable

from asyncrl.controller.alarms.alarm import Alarm
from asyncrl.controller.observers.events import Event, GroupPoisoned, Prompt

REPORTED = 5
"""Groups that are reported one by one."""
EXCERPT = 200
"""Characters of a prompt that are shown."""
ADVICE = (
    "If its prompt is to blame, take it out of the task. If the reason is a call that was not answered in time, look "
    "into the logs/ of the worker that is named, or raise fleet.call_deadline or generation.deadline"
)


class PoisonedGroups:
    """Reports the first poisoned groups one by one, with advice at the first, and then that the rest is only counted.

    say: shows a text to the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.poisoned = Alarm(reported=REPORTED)

    def observe(self, event: Event) -> None:
        if not isinstance(event, GroupPoisoned):
            return
        if self.poisoned.count():
            what = f"group {event.group} is given up as poison, its open samples will not train: {event.reason}"
            advice = [ADVICE] if self.poisoned.total == 1 else []
            self._say("\n".join([what, f"  prompt: {_excerpt(event.prompt)}", *advice]))
        elif self.poisoned.total == REPORTED + 1:
            self._say("further groups are given up as poison; they are counted as data/dropped/poison in metrics.jsonl")


def _excerpt(prompt: Prompt) -> str:
    text = repr(prompt)
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."
